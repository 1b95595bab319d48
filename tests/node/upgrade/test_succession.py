"""What happens to the node if the next program cannot take over."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from node.contract.driver import NotNow
from node.errors import Aborted
from node.events.journal import Journal
from node.logs import LogRing
from node.upgrade import succession
from node.upgrade.program import Program, Successor
from node.upgrade.succession import Succession
from protos.handover_pb2 import Handover

NEXT = Successor("txnode 2", several=True)


class Port:
    def __init__(self) -> None:
        self.reading = True

    def fileno(self) -> int:
        return 0

    def stopReading(self) -> None:
        self.reading = False

    def startReading(self) -> None:
        self.reading = True


class Executed(BaseException):
    """The process has executed another program."""


class Becoming:
    """A program that records whether it was executed."""

    def __init__(self) -> None:
        self.become_of: list[int] = []
        self.fault: Exception | None = None

    def header(self, silence: float | None) -> dict[str, object]:
        return {}

    def become(self, handle: int, environment: object) -> None:
        self.become_of.append(handle)
        raise self.fault or Executed


async def nothing(*_: object) -> None:
    """A part that closes without an error."""


class House:
    """A succession with the parts around it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.program = Becoming()
        self.port = Port()
        self.closings = 0
        self.fault: Exception | None = None
        # Called while the state file is being closed.
        self.meanwhile: Callable[[], object] = lambda: None
        self.store = SimpleNamespace(fault="", go_back=lambda: None, flush=nothing, close=self._close)
        self.succession = Succession(
            self.clock,
            {},
            ring=LogRing(self.clock, 10),
            journal=Journal(cast(Any, self.clock)),
            state=cast(Any, SimpleNamespace(lock=0)),
            store=cast(Any, self.store),
            backend=cast(
                Any,
                SimpleNamespace(leave=self._leave, rest=lambda: None, close=nothing, unsteady=lambda several: ""),
            ),
            calls=SimpleNamespace(end_readers=lambda: None, idle=lambda: True, close=lambda: None),
            connections=SimpleNamespace(finish=nothing),
            systemd=SimpleNamespace(reloading=lambda: None, silence=None),
            sweep=lambda pids: None,
        )
        self.succession.ports["rest"] = self.port

    async def _close(self) -> None:
        self.closings += 1
        self.meanwhile()

    async def _leave(self, several: bool, go: Callable[[Handover], Awaitable[None]]) -> None:
        if self.fault is not None:
            raise self.fault
        await go(Handover())

    def upgrade(self) -> object:
        """The outcome: a reason, or an error."""
        found: list[object] = []
        work: Deferred[str] = ensureDeferred(self.succession.succeed(cast(Program, self.program), NEXT))
        work.addBoth(found.append)
        self.clock.pump([0.0] * 20)
        return found[0].value if isinstance(found[0], Failure) else found[0]


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(succession, "write", lambda words, handover: 7)
    return House()


@pytest.mark.parametrize("fault", [NotNow("a core is ending"), Aborted(), OSError("no"), RuntimeError("a bug")])
def test_ports_accept_again(fault: Exception, house: House) -> None:
    """Whatever prevented the upgrade, even a Stop that came meanwhile: the ports accept connections again."""
    house.fault = fault
    found = house.upgrade()
    assert found == str(fault) or found is fault
    assert house.port.reading and not house.program.become_of


def test_what_is_not_on_disk(house: House) -> None:
    """There is no upgrade: the next program would start from the state file, and lose the rest."""
    house.store.fault = "the state cannot be written"
    assert house.succession.unsteady(True) == house.upgrade() == "the state cannot be written"
    assert house.port.reading and not house.program.become_of


@pytest.mark.parametrize("ends", [False, True])
def test_one_that_is_to_end(ends: bool, house: House) -> None:
    """A signal that came while the state was being closed is not forgotten."""
    if ends:
        house.meanwhile = partial(house.clock.callLater, 0, house.succession.end)
    house.upgrade()
    assert house.program.become_of == ([] if ends else [7])
    assert not house.port.reading and house.closings == 1


def test_the_end_while_all_is_being_closed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end cancels all work on cores, this too: the closing is completed, and nothing comes after it."""
    closing: Deferred[None] = Deferred()
    closed: list[str] = []

    async def close() -> None:
        await closing
        closed.append("the state")

    house.store.close = close
    work: Deferred[str] = ensureDeferred(house.succession.succeed(cast(Program, house.program), NEXT))
    house.succession.end()
    work.cancel()
    closing.callback(None)
    house.clock.pump([0.0] * 20)
    assert closed == ["the state"] and not house.program.become_of
    outcomes: list[object] = []
    work.addBoth(outcomes.append)
    assert outcomes == [""]


def test_no_version_can_be_run(house: House) -> None:
    """Everything is closed by then: the process exits with a failure, so that its supervisor restarts it."""
    ends: list[object] = []
    clock: Any = house.clock
    clock.addSystemEventTrigger = lambda *words: ends.append(words)
    clock.stop = lambda: ends.append("stop")
    house.program.fault = OSError("no such file")
    assert house.upgrade() == ""
    assert ends == [("after", "shutdown", os._exit, 1), "stop"]


@pytest.mark.parametrize(
    ("host", "other"),
    [("localhost", "127.0.0.2"), ("127.0.0.1", "127.0.0.2"), ("0:0:0:0:0:0:0:1", "::"), ("::", "::1")],
)
def test_a_port_that_is_held(host: str, other: str, house: House) -> None:
    """The port stays open, however the operator names the host; not if they want another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as held:
        held.bind((host, 0))
        held.listen()
        port = held.getsockname()[1]
        house.succession._left.ports["rest"] = held.fileno()
        assert house.succession.held("rest", host, port) == held.fileno()
        assert house.succession.held("rest", host, port + 1) is None
        assert house.succession.held("rest", other, port) is None
        assert house.succession.held("grpc", host, port) is None


class Jobs:
    """Updates, one of which may be under way."""

    def __init__(self) -> None:
        self.under_way = ""
        self.left = False

    async def leave(self) -> None:
        self.left = True


def test_an_update_that_began_meanwhile(house: House) -> None:
    """It may be replacing the next program's files: the upgrade waits for it."""
    jobs = house.succession.jobs = Jobs()
    jobs.under_way = "txnode 2"
    assert house.succession.unsteady(True) == house.upgrade() == "an update of txnode 2 is under way"
    assert house.port.reading and not house.program.become_of and not jobs.left
    jobs.under_way = ""
    house.upgrade()
    assert house.program.become_of == [7] and jobs.left
