"""The ports: taken over from the node before, and left to the next one when replies have arrived."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock

from node.contract.keeper import Keeper
from node.door import ports
from node.door.connections import LOOK
from node.door.options import DoorOptions
from node.door.ports import Place, Ports


class Holding(Keeper):
    """A keeper that holds descriptors, and notes what it is asked for."""

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {}
        self.asked: list[tuple[str, str]] = []

    def put(self, name: str, descriptors: object) -> None:
        self.asked.append(("put", name))

    def take(self, name: str) -> list[int]:
        return self.held.pop(name, [])

    def drop(self, names: Any) -> None:
        self.asked += [("drop", name) for name in names]


class Calls:
    """The calls of controllers: whether it is known of each reply whether it was delivered."""

    def __init__(self) -> None:
        self.settled = True
        self.ended = self.closed = 0

    def end_readers(self) -> None:
        self.ended += 1

    def idle(self) -> bool:
        return True

    def close(self) -> None:
        self.closed += 1

    def knows(self, *_: object) -> bool:
        return True


@pytest.fixture
def keeper() -> Holding:
    return Holding()


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def made(tmp_path: Path, clock: Clock, keeper: Holding, calls: Calls) -> Ports:
    authenticator = SimpleNamespace(lets_in=lambda *_: True)
    files = DoorOptions(cert_file=tmp_path / "c", key_file=tmp_path / "k")
    place = Place(tmp_path, None, keeper)
    nothing, any_clock = cast(Any, None), cast(Any, clock)
    return Ports(any_clock, nothing, cast(Any, calls), cast(Any, authenticator), nothing, files, place)


@pytest.mark.parametrize(
    ("host", "other"),
    [("127.1", "127.0.0.2"), ("127.0.0.1", "127.0.0.2"), ("0:0:0:0:0:0:0:1", "::"), ("::", "::1")],
)
def test_a_port_that_is_held(host: str, other: str, made: Ports, keeper: Holding) -> None:
    """The port stays open, however the operator names the host; it is closed if they want another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as held:
        held.bind((host, 0))
        held.listen()
        port = held.getsockname()[1]

        def asked(name: str, host: str, port: int) -> int | None:
            keeper.held["listen/rest"] = [os.dup(held.fileno())]
            return made._held(name, host, port)

        found = asked("rest", host, port)
        assert found is not None and os.fstat(found).st_ino == os.fstat(held.fileno()).st_ino
        os.close(found)
        assert not keeper.asked
        for wrong in ((host, port + 1), (other, port)):
            assert asked("rest", *wrong) is None
            assert keeper.asked.pop() == ("drop", "listen/rest")
        assert asked("grpc", host, port) is None and not keeper.asked
        os.close(keeper.held["listen/rest"][0])


def test_without_a_keeper(tmp_path: Path, made: Ports) -> None:
    assert made._held("rest", "127.0.0.1", 1) is None


def finishing(made: Ports, monkeypatch: pytest.MonkeyPatch) -> Deferred[None]:
    async def at_once(*_: object) -> None:
        pass

    monkeypatch.setattr(made.connections, "finish", at_once)
    return ensureDeferred(made.finish())


def test_replies_on_their_way(made: Ports, calls: Calls, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hand-over waits until they are delivered."""
    calls.settled = False
    done = finishing(made, monkeypatch)
    clock.pump([LOOK] * 3)
    assert not done.called and calls.ended == 1
    calls.settled = True
    clock.pump([LOOK] * 2)
    assert done.called
    made.leave()
    assert calls.closed == 1


def test_replies_that_are_never_delivered(
    made: Ports, calls: Calls, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for a client that does not read."""
    calls.settled = False
    done = finishing(made, monkeypatch)
    clock.pump([ports.FINISH / 10] * 11)
    assert done.called


def test_new_clients_wait(made: Ports) -> None:
    """They stay in the backlog while the node is left, or takes over."""
    words: list[str] = []
    port = SimpleNamespace(startReading=lambda: words.append("on"), stopReading=lambda: words.append("off"))
    made.listening["rest"] = cast(Any, port)
    made.admit(False)
    made.admit(True)
    assert words == ["off", "on"]
    # A node that ends accepts no client any more.
    made._ending = True
    made.admit(True)
    assert words == ["off", "on"]
