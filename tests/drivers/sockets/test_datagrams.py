"""UDP steered from one process to another: each datagram reaches the process steered to last."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from drivers.sockets import steering
from drivers.sockets.held import Unsteerable
from drivers.sockets.steering import Datagrams
from tests.harness import handed_on
from tests.harness.answering import NOBODY, Port, end


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::"])
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    with closing(Datagrams(handed_on.shelf())) as steering:
        made = Port(steering, request.param, ["127.0.0.1"])
        with made.stack:
            yield made


def test_steering_and_exits(port: Port) -> None:
    """A process gets no datagrams until it is steered to; after an exit the newest or only other one gets all."""
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


def test_handed_over(port: Port) -> None:
    """The next node process goes on steering, and tells processes that join from strangers."""
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
    """The next node knows the order of sockets, also after processes have exited meanwhile."""
    steering = port.steering
    assert isinstance(steering, Datagrams)
    a, b, c, d = (port.join(name) for name in "abcd")
    steering.steer(c.pid)
    end(a)
    steering.leave(a.pid)
    for led, gone in ((c, None), (b, None), (d, b), (d, c)):
        port.steering = steering = handed_on.steering(steering)
        if gone is not None:
            end(gone)
            port.steering = steering = handed_on.steering(steering)
            steering.leave(gone.pid)
        steering.steer(led.pid)
        assert port.met() == {"bcd"[[b, c, d].index(led)]}
    port.join("e")
    assert port.met() == {"d"}


def test_before_an_exit(port: Port) -> None:
    """Before an exit clients are refused at once, and no process gets datagrams; their ends change nothing."""
    assert isinstance(port.steering, Datagrams)
    port.join("a")
    new = port.join("b")
    port.steering.steer(new.pid)
    port.steering.silence(new.pid)
    assert port.met() == {NOBODY}
    end(new)
    port.steering.leave(new.pid)


def test_a_stranger(port: Port) -> None:
    """An unknown socket at the address is detected at once and at each join."""
    port.start("x")
    with pytest.raises(Unsteerable, match="another process"):
        port.join("a")


def test_a_stranger_who_comes_later(port: Port) -> None:
    port.join("a")
    port.start("x")
    with pytest.raises(Unsteerable, match="another process"):
        port.join("b")
    assert port.met() == {"a"}


def test_a_table_that_lists_a_socket_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lists a socket twice if others are bound while its table is read: inodes are counted."""
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
            monkeypatch.setitem(steering._TABLES, socket.AF_INET, table)
            assert steering.crowd(one) == count
