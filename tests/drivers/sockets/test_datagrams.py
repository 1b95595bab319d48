"""Datagrams led from one process to another: each goes where the last word said, whoever comes and goes."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from drivers.sockets import datagrams, unheard
from drivers.sockets.datagrams import Datagrams
from drivers.sockets.group import Unsteerable
from tests.harness import handed_on
from tests.harness.answering import NOBODY, Port, end


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::"])
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    with closing(Datagrams()) as steering:
        made = Port(steering, request.param, ["127.0.0.1"])
        with made.stack:
            yield made


def test_led_and_left(port: Port) -> None:
    """Who joins gets none until it is led to; the newest of the others has all after an end, and who is alone."""
    assert isinstance(port.steering, Datagrams)
    old = port.join("a")
    new = port.join("b")
    assert port.met() == {"a"}
    port.steering.steer(new.pid)
    assert port.met() == {"b"}
    newest = port.join("c")
    assert port.met() == {"b"}
    port.steering.steer(newest.pid)
    for one, left in ((newest, "b"), (new, "a")):
        end(one)
        port.steering.leave(one.pid)
        assert port.met() == {left}
    port.steering.close()
    port.start("d")
    assert port.met() == {"a"}
    assert old.poll() is None


def test_handed_on(port: Port) -> None:
    """Another program of the node leads them as the one before it did, and knows who joins from a stranger."""
    assert isinstance(port.steering, Datagrams)
    old, new = port.join("a"), port.join("b")
    port.steering.steer(new.pid)
    for name in "cd":
        port.steering = handed_on.steering(port.steering)
        assert port.met() == {"b"}
        port.join(name)
        assert port.met() == {"b"}
    port.steering = handed_on.steering(port.steering)
    end(new)
    port.steering.leave(new.pid)
    assert port.met() == {"d"}
    port.steering.steer(old.pid)
    assert port.met() == {"a"}
    port.steering.close()


def test_the_node_is_killed(port: Port) -> None:
    """Another one finds out who is where without a word to any, whoever has ended before."""
    steering = port.steering
    assert isinstance(steering, Datagrams)
    a, b, c, d = (port.join(name) for name in "abcd")
    steering.steer(c.pid)
    end(a)
    steering.leave(a.pid)
    for led, there in ((c, (b, c, d)), (b, (b, c, d)), (d, (c, d)), (d, (d,))):
        for gone in {b, c, d} - set(there):
            end(gone)
        handed_on.killed(steering)
        port.steering = steering = Datagrams()
        steering.regain({one.pid: port.ports for one in there}, led.pid)
        assert port.met() == {"bcd"[[b, c, d].index(led)]}
    port.join("e")
    assert port.met() == {"d"}


def test_the_node_is_killed_under_a_flood(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a socket drops so many that ours cannot be told apart, nothing is believed."""
    numbers = itertools.count(0, 100)
    monkeypatch.setattr(unheard, "_dropped", lambda one: next(numbers))
    a, b = port.join("a"), port.join("b")
    handed_on.killed(port.steering)
    steering = port.steering = Datagrams()
    with pytest.raises(Unsteerable, match="drops so many"):
        steering.regain({one.pid: port.ports for one in (a, b)}, b.pid)


def test_before_an_end(port: Port) -> None:
    """Clients are refused at once, and given to nobody; what is left of the processes is nobody's affair."""
    assert isinstance(port.steering, Datagrams)
    port.join("a")
    new = port.join("b")
    port.steering.steer(new.pid)
    port.steering.silence(new.pid)
    assert port.met() == {NOBODY}
    end(new)
    port.steering.leave(new.pid)


def test_a_stranger(port: Port) -> None:
    """Another socket at the address, which nobody took up, is noticed at once and at every join."""
    port.start("x")
    with pytest.raises(Unsteerable, match="another process"):
        port.join("a")


def test_a_stranger_who_comes_later(port: Port) -> None:
    port.join("a")
    port.start("x")
    with pytest.raises(Unsteerable, match="another process"):
        port.join("b")
    assert port.met() == {"a"}


def test_a_table_that_tells_of_one_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the kernel's does when sockets come while it is read: they are counted by what they are."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        row = next(
            line
            for line in Path("/proc/net/udp").read_text().splitlines()[1:]
            if line.split()[9] == str(os.fstat(one.fileno()).st_ino)
        )
        other = row.replace(row.split()[9], "1")
        for rows, count in (([row, row], 1), ([row, other, row], 2)):
            table = tmp_path / "udp"
            table.write_text("\n".join(["its heading", *rows]))
            monkeypatch.setitem(datagrams._TABLES, socket.AF_INET, table)
            assert datagrams.crowd(one) == count
