"""Cores as processes of the keeper: started, left to the next node, recovered there, or found to have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.task import Clock

from drivers.process.child import MAX_LINE, CoreProcess
from drivers.process.kept import KeptProcess, left, recover, silent
from node.base.errors import CoreFailed
from node.contract.driver import Exit
from node.contract.keeper import Keeper, Spawned
from node.contract.leaving import Gone
from protos.handover_pb2 import Output, Process
from scripts.staging.wait import until
from tests.harness.open_files import many_files

ECHO = """
import sys
for line in sys.stdin:
    for there in sys.stdout, sys.stderr:
        print(line.strip(), there.fileno(), file=there, flush=True)
"""


class Spawning(Keeper):
    """A keeper in the test's process, without descriptors by name. `known`: the processes that were left."""

    lasts = True

    def __init__(self) -> None:
        self.known: dict[int, Spawned] = {}
        self.exits: dict[int, Callable[[int], None]] = {}
        self.asked: list[tuple[Sequence[str], Mapping[str, str], Mapping[int, int]]] = []

    def spawn(self, argv: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]) -> Spawned:
        self.asked.append((argv, environment, descriptors))
        found = self.began(
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        return self.known.pop(found.pid)

    def began(self, process: subprocess.Popen[bytes], ended: bool = False) -> subprocess.Popen[bytes]:
        """Hold this process as one that was left."""
        assert process.stdout and process.stderr
        outputs = {1: os.dup(process.stdout.fileno()), 2: os.dup(process.stderr.fileno())}
        for pipe in outputs.values():
            os.set_blocking(pipe, False)
        process.stdout.close()
        process.stderr.close()
        self.known[process.pid] = Spawned(process.pid, os.pidfd_open(process.pid), outputs, ended)
        return process

    def spawned(self, pid: int) -> Spawned | None:
        return self.known.pop(pid, None)

    def when_exited(self, pid: int, exited: Callable[[int], None]) -> None:
        self.exits[pid] = exited


class Reading(Clock):
    """A reactor that reads when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[Any] = []

    def addReader(self, reader: Any) -> None:
        if reader not in self.readers:
            self.readers.append(reader)

    def removeReader(self, reader: Any) -> None:
        if reader in self.readers:
            self.readers.remove(reader)

    def removeWriter(self, writer: Any) -> None:
        pass

    def read(self) -> None:
        """Read what is there."""
        for reader in [*self.readers]:
            if (why := reader.doRead()) is not None:
                self.removeReader(reader)
                reader.connectionLost(why)


class House:
    def __init__(self) -> None:
        self.reactor, self.keeper = Reading(), Spawning()
        self.lines: list[str] = []
        self.core = CoreProcess(cast(Any, self.reactor), self.lines.extend)

    def recover(self, process: Process) -> None:
        recover(cast(Any, self.reactor), self.keeper, self.core, process)

    def start(self, *argv: str) -> None:
        spawned = self.keeper.spawn(argv, {"ONE": "two"}, {0: 0})
        KeptProcess(self.reactor, self.keeper, self.core, spawned)
        self.core.stay()

    def end(self) -> Exit:
        """Wait until the core has ended."""

        def ended() -> Exit | None:
            self.reactor.read()
            return self.core.exit

        found = until(ended, 10, "it has ended")
        assert found is not None
        return found

    def read(self, lines: Collection[str]) -> None:
        def there() -> bool:
            self.reactor.read()
            self.reactor.advance(1)
            return {*lines} <= {*self.lines}

        until(there, 10, "the lines are read")


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def child(house: House) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was left; it echoes what it reads to both outputs."""
    argv = [sys.executable, "-I", "-S", "-u", "-c", ECHO]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, **pipes) as process:  # type: ignore[call-overload]
        yield house.keeper.began(process)
        process.kill()


def is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").exists()


def say(child: subprocess.Popen[bytes], words: bytes) -> None:
    assert child.stdin
    child.stdin.write(words)
    child.stdin.flush()


def status_of(child: subprocess.Popen[bytes]) -> int:
    """The wait status of a process that is ending."""
    code = child.wait(10)
    return -code if code < 0 else code << 8


def test_a_core_that_is_left(child: subprocess.Popen[bytes], house: House) -> None:
    """Its outputs are read from `stay` on, from the middle of a line; then it is left with what was read."""
    long = "x" * MAX_LINE
    tails = [Output(number=1, tail=b"un"), Output(number=2, tail=long.encode(), cutting=True)]
    house.recover(Process(pid=child.pid, outputs=tails, lines=["before"], panic=["panic: b"], allowance="1 MiB"))
    say(child, b"finished\n")
    assert isinstance(house.core.transport, KeptProcess) and not house.reactor.readers
    assert house.core.pid == child.pid
    house.core.stay()
    house.read(["unfinished 1", long])
    assert house.core.last_lines[:2] == ("panic: b", "before")
    assert house.core.allowance == "1 MiB"
    house.core.leave()
    assert not house.reactor.readers and not house.reactor.getDelayedCalls()
    found = left(house.core)
    assert found.pid == child.pid and {*found.lines} == {"before", "unfinished 1", long}
    assert [(each.number, each.tail, each.cutting) for each in found.outputs] == [(1, b"", False), (2, b"", False)]


def test_its_end(child: subprocess.Popen[bytes], house: House) -> None:
    """The last lines are read before it counts as ended; its descriptors are closed."""
    spawned = house.keeper.known[child.pid]
    house.recover(Process(pid=child.pid))
    house.core.stay()
    say(child, b"last\n")
    ends: list[Exit] = []
    house.core.when_exited().addCallback(ends.append)
    assert child.stdin
    child.stdin.close()
    house.keeper.exits[child.pid](status_of(child))
    house.read(["last 1", "last 2"])
    assert ends == [house.end()] and ends[0].code == 0
    for descriptor in (spawned.pidfd, *spawned.outputs.values()):
        assert not is_open(descriptor)
    with pytest.raises(CoreFailed, match="ended"):
        left(house.core)


def test_its_end_by_a_signal(child: subprocess.Popen[bytes], house: House) -> None:
    """Signals go to the process itself, and none after its end."""
    house.recover(Process(pid=child.pid))
    house.core.stay()
    transport: Any = house.core.transport
    transport.signalProcess(signal.SIGCONT)
    house.core.signal(signal.SIGTERM)
    status = status_of(child)
    assert status == signal.SIGTERM
    with pytest.raises(ProcessExitedAlready):
        transport.signalProcess("KILL")
    house.keeper.exits[child.pid](status)
    assert house.end().code == -signal.SIGTERM
    with pytest.raises(ProcessExitedAlready):
        transport.signalProcess("KILL")
    transport.reapProcess()


def test_a_core_whose_end_was_noticed(child: subprocess.Popen[bytes], house: House) -> None:
    """It is no reason to go back to the previous version; its last lines and its status come, then all is closed."""
    say(child, b"last\n")
    assert child.stdin
    child.stdin.close()
    status, spawned = status_of(child), house.keeper.known[child.pid]._replace(ended=True)
    house.keeper.known[child.pid] = spawned
    with pytest.raises(Gone):
        house.recover(Process(pid=child.pid, outputs=[Output(number=1, tail=b"the "), Output(number=2)]))
    house.keeper.exits[child.pid](status)
    house.read(["the last 1", "last 2"])
    assert house.end().code == 0
    for descriptor in (spawned.pidfd, *spawned.outputs.values()):
        assert not is_open(descriptor)


@pytest.mark.parametrize("descriptors", [0, 1100])
def test_one_that_does_not_answer(descriptors: int, child: subprocess.Popen[bytes], house: House) -> None:
    """It may have ended, of which the keeper's event comes later; however many descriptors the node has."""
    with many_files(descriptors):
        house.keeper.known[child.pid] = again(house.keeper.known[child.pid])
        house.recover(Process(pid=child.pid))
        house.core.stay()
        assert isinstance(silent(house.core), CoreFailed)
        child.kill()
        status = status_of(child)
        assert isinstance(silent(house.core), Gone)
        house.keeper.exits[child.pid](status)
        assert house.end().code == -signal.SIGKILL
        assert isinstance(silent(house.core), Gone)


def again(spawned: Spawned) -> Spawned:
    """The same, with the next free number of a descriptor."""
    found = os.dup(spawned.pidfd)
    os.close(spawned.pidfd)
    return spawned._replace(pidfd=found)


def test_a_process_of_another_parent(house: House) -> None:
    """It is not the core that was handed over, but one with its number: the keeper does not know it."""
    with pytest.raises(Gone):
        house.recover(Process(pid=1))
    assert house.core.transport is None


def test_one_that_the_keeper_starts(house: House) -> None:
    """Its output is read at once."""
    house.start("/bin/sh", "-c", "echo began; echo but >&2; exec sleep 100")
    [(argv, environment, descriptors)] = house.keeper.asked
    assert (argv[0], environment, descriptors) == ("/bin/sh", {"ONE": "two"}, {0: 0})
    house.read(["began", "but"])
    house.core.leave()
    assert left(house.core).pid == house.core.pid
    house.core.signal(signal.SIGKILL)
    assert house.core.pid
    assert os.waitpid(house.core.pid, 0)[1] == signal.SIGKILL


def test_one_that_ends_with_the_node(house: House) -> None:
    """Without a keeper there is nothing to leave."""
    house.core.makeConnection(cast(Any, type("Transport", (), {"pid": 7, "pipes": {}})()))
    with pytest.raises(CoreFailed, match="no keeper"):
        left(house.core)
