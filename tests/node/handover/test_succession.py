"""What a node takes over and leaves, and what happens to it if the next version cannot go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure

from node import __version__
from node.base.errors import Aborted, CoreFailed, InvalidConfig
from node.base.logs import LogRing
from node.base.part import Part, Parts
from node.contract.leaving import NotNow
from node.contract.saved import Saved
from node.events.journal import Journal
from node.handover import arrival, succession
from node.handover.arrival import Arrival, Sweep
from node.handover.attempt import TRYING
from node.handover.house import House as NodeHouse
from node.handover.keeper import FAILED, WAITING
from node.handover.program import PATH, PATIENCE, Program, Refused
from node.handover.snapshots import FORMAT, memory_of
from node.handover.succession import Succession
from node.handover.ties import Ties
from protos.handover_pb2 import Handover, Ring, Run

VERSION = "txnode 2"
COMMAND, BACK = ("python", "twistd", "--nodaemon", "node"), ({"BACK": "yes"}, ("python", "twistd"))


class Port:
    def __init__(self) -> None:
        self.reading = True

    def fileno(self) -> int:
        return 0

    def stopReading(self) -> None:
        self.reading = False

    def startReading(self) -> None:
        self.reading = True


class Exited(BaseException):
    """The process has exited."""


class Bound:
    """Ties to a keeper: `asked` records requests. `reason`: why the next version does not start; None: it is silent."""

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {}
        self.asked: list[Sequence[object]] = []
        self.left = Handover()
        self.reason: str | None = ""
        self.fault: OSError | None = None
        self.next_said: Callable[[str], None] = lambda _: None

    def hello(self) -> None:
        self.asked.append(("hello",))

    def follow(self, reactor: object) -> None:
        self.asked.append(("follow",))

    def take(self, name: str) -> list[int]:
        return self.held.pop(name, [])

    def drop(self, names: Sequence[str]) -> None:
        self.asked.append(("drop", *names))

    def put(self, name: str, descriptors: Sequence[int]) -> None:
        if self.fault is not None:
            raise self.fault
        self.asked.append(("put", name))
        if name == "state":
            [memory] = descriptors
            self.left = Handover.FromString(os.pread(memory, 1 << 20, 0))

    def drop_leftover(self) -> None:
        self.asked.append(("drop leftover",))

    async def end_others(self) -> None:
        self.asked.append(("end others",))

    def up(self, seconds: float) -> None:
        self.asked.append(("up", seconds))

    def start_next(
        self, command: object, plain: object, back: object, patience: float, said: Callable[[str], None]
    ) -> None:
        self.asked.append(("next", command, plain, back, patience))
        self.next_said = said
        if self.reason is not None:
            self.next_said(self.reason)

    def cancel_next(self, reason: str) -> None:
        self.asked.append(("cancel", reason))

    def fail(self, reason: str) -> None:
        self.asked.append(("fail", reason))

    def bye(self) -> None:
        self.asked.append(("bye",))

    @property
    def words(self) -> list[object]:
        return [word for word, *_ in self.asked]


class Shots:
    """Snapshots that record their calls."""

    def __init__(self, *_: object) -> None:
        self.calls: list[object] = []

    def go_on(self, left: Handover) -> None:
        self.calls.append(("go on", left.run.pid))

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


async def nothing(*_: object) -> None:
    """A part that closes without an error."""


class Around(Part):
    """The other parts of the node."""

    title = "what is around"

    def __init__(self, house: House) -> None:
        self._house = house
        self.committed: list[str | None] = []
        self.left = False

    def settle(self, outcome: str | None) -> None:
        self.committed.append(outcome)

    @property
    def unsteady(self) -> str:
        return self._house.store.fault or self._house.updating

    def admit(self, on: bool) -> None:
        (self._house.port.startReading if on else self._house.port.stopReading)()

    async def leave(self) -> None:
        self.left = True
        await self._house.store.close()


class House:
    """A succession with the parts around it."""

    def __init__(self, ties: Bound | None) -> None:
        self.clock = Clock()
        self.ties = ties or Bound()
        self.port = Port()
        self.closings = self.went_back = 0
        self.fault: Exception | None = None
        # Why a core could not go on with its configuration.
        self.obstacle: InvalidConfig | None = None
        self.written: list[object] = []
        # The runs that are left; None if there are none to leave.
        self.runs: Handover | None = Handover()
        # Called while the state file is being closed.
        self.meanwhile: Callable[[], object] = lambda: None
        self.store = SimpleNamespace(
            fault="",
            event=self.written.append,
            go_back=self._go_back,
            flush=nothing,
            close=self._close,
            peek=lambda: self.saved,
        )
        # The update under way.
        self.updating = ""
        self.environment: dict[str, str] = {}
        # The saved state, None if it cannot be read; what was prepared, and what fails that.
        self.saved: Saved | None = Saved(b"backend")
        self.prepared: list[Saved] = []
        self.unprepared: Exception | None = None
        self.swept: list[list[int]] = []
        self.inherited: list[Handover] = []
        self.backend_closed = False
        self.ring = LogRing(cast(Any, self.clock), 10)
        self.program = SimpleNamespace(
            next=COMMAND,
            beside=lambda script: [COMMAND[0], script, *COMMAND[1:]],
            back=lambda environment: BACK,
        )
        self.leaving = SimpleNamespace(
            rehearse=self._rehearse,
            leave=self._leave,
            shut_down=self._close_backend,
            inherit=lambda left, heirs: self.inherited.append(left),
            prepare=self._prepare,
        )
        self.house = house = NodeHouse(
            ring=self.ring,
            journal=Journal(cast(Any, self.clock)),
            store=cast(Any, self.store),
            parts=Parts(around := Around(self)),
            systemd=cast(Any, SimpleNamespace(reloading=lambda: None)),
            sweep=self._sweep,
        )
        bound, leaving = cast("Ties | None", ties), cast(Any, self.leaving)
        clock = cast(Any, self.clock)
        self.arrival = Arrival(clock, self.environment, bound, 60.0, leaving, house)
        self.succession = Succession(clock, self.environment, bound, self.arrival, leaving, house)
        self.around = around

    async def _rehearse(self) -> None:
        if self.obstacle is not None:
            raise self.obstacle

    async def _prepare(self, saved: Saved) -> None:
        if self.unprepared is not None:
            raise self.unprepared
        self.prepared.append(saved)

    def _go_back(self) -> None:
        self.went_back += 1

    async def _close(self) -> None:
        self.closings += 1
        self.meanwhile()

    async def _close_backend(self) -> None:
        self.backend_closed = True

    def _sweep(self, pids: Collection[int]) -> list[int]:
        self.swept.append(sorted(pids))
        return []

    async def _leave(self, go: Callable[[Handover], Awaitable[None]]) -> None:
        if self.fault is not None:
            raise self.fault
        if self.runs is not None:
            await go(self.runs)

    def begin(self) -> Deferred[str]:
        return ensureDeferred(self.succession.succeed(cast(Program, self.program), VERSION))

    def upgrade(self) -> object:
        """The outcome: a reason, or an error."""
        found: list[object] = []
        self.begin().addBoth(found.append)
        self.clock.pump([0.0] * 20)
        return found[0].value if isinstance(found[0], Failure) else found[0]

    def prepare(self) -> list[Saved]:
        """What is prepared while the version before serves."""
        preparing = ensureDeferred(self.arrival.prepare())
        assert preparing.called
        return self.prepared

    @property
    def shots(self) -> Shots:
        return cast(Shots, self.arrival.snapshots)

    def take(self, handover: Handover | None = None) -> None:
        """Take over what a node before has left."""
        if handover is not None:
            handover.format = handover.format or FORMAT
            self.ties.held["state"] = [memory_of(handover.SerializeToString())]
        self.arrival.start()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process exited."""
    found: list[int] = []

    def leave(status: int) -> None:
        found.append(status)
        raise Exited

    monkeypatch.setattr(os, "_exit", leave)
    return found


@pytest.fixture
def house(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(arrival, "Snapshots", Shots)
    return House(Bound())


@pytest.fixture
def alone(exits: list[int]) -> House:
    """A node without a keeper."""
    return House(None)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    found: list[str] = []

    def observe(event: Any) -> None:
        found.append(str(event.get("log_format")))

    globalLogPublisher.addObserver(cast(Any, observe))
    yield found
    globalLogPublisher.removeObserver(cast(Any, observe))


# To the next version


def test_all_is_left(house: House, exits: list[int]) -> None:
    """Exactly: the runs, the log lines; then the process exits, and the keeper answers the next one."""
    house.runs = Handover(run=Run(pid=7, core=b"core"), common=b"together")
    house.upgrade()
    left = house.ties.left
    assert (left.format, left.version, left.exact) == (FORMAT, __version__, True)
    assert (left.run.core, left.common) == (b"core", b"together")
    assert any(f"upgrading the node to {VERSION}" in line for line in left.ring.lines)
    interpreter, script, *words = cast(Any, house.ties.asked[0][1])[1]
    assert (interpreter, *words) == COMMAND and Path(script).is_file()
    assert house.ties.asked[0][2:] == (({}, COMMAND), BACK, PATIENCE)
    assert (exits, house.closings, house.port.reading, house.shots.calls) == ([0], 1, False, ["stop"])


def test_nothing_runs(house: House, exits: list[int]) -> None:
    """The backend is closed, and the rest is left."""
    house.runs = None
    house.upgrade()
    assert house.backend_closed and exits == [0]
    assert house.ties.left.exact and not house.ties.left.HasField("run")


def test_nothing_runs_and_the_next_one_fails(house: House, exits: list[int]) -> None:
    """The backend is closed only when nothing can keep the node any more: it goes on with a backend that works."""
    house.runs = None
    house.ties.reason = None
    work = house.begin()

    async def fail(_: object) -> None:
        house.ties.next_said("it ended by signal 9")

    house.leaving.leave = fail
    house.ties.next_said("")
    house.clock.pump([0.0] * 20)
    found: list[object] = []
    work.addBoth(found.append)
    assert "it ended by signal 9" in str(found[0])
    assert not house.backend_closed and not exits and house.port.reading


def test_a_backend_that_cannot_be_closed(house: House, exits: list[int]) -> None:
    """The process exits with a failure, so that the keeper starts it again: nothing may run in it any more."""

    async def fail() -> None:
        raise ZeroDivisionError

    house.runs = None
    house.leaving.shut_down = fail
    house.upgrade()
    assert exits == [succession.FAILURE]


def test_a_core_that_could_not_go_on(house: House, exits: list[int]) -> None:
    """That is found out by a rehearsal, before the next version is started."""
    house.obstacle = InvalidConfig("the core refuses it")
    assert house.upgrade() is house.obstacle
    assert not house.ties.asked and house.port.reading and not house.closings


def test_one_that_does_not_start(house: House, exits: list[int]) -> None:
    """All goes on without a gap, and the operator gets the reason."""
    house.ties.reason = "ImportError: no"
    assert isinstance(found := house.upgrade(), Refused) and "ImportError: no" in str(found)
    assert house.ties.words == ["next"] and house.port.reading and not house.closings
    # The next one does.
    house.ties.reason = ""
    house.upgrade()
    assert exits == [0]


def test_this_one_serves_until_the_next_is_ready(house: House, exits: list[int]) -> None:
    """It may take long to import; an event that comes later changes nothing."""
    house.ties.reason = None
    work = house.begin()
    assert house.port.reading and not house.closings
    house.ties.next_said("")
    house.ties.next_said("it ended by signal 9")
    house.clock.pump([0.0] * 20)
    assert exits == [0] and not house.port.reading
    work.addErrback(lambda failure: failure.trap(Exited))


@pytest.mark.parametrize("fault", [NotNow("a core is ending"), Aborted(), OSError("no"), RuntimeError("a bug")])
def test_ports_accept_again(fault: Exception, house: House, exits: list[int]) -> None:
    """Whatever prevented the upgrade, even a Stop that came meanwhile: the ports accept connections again."""
    house.fault = fault
    found = house.upgrade()
    assert found == str(fault) or found is fault
    assert house.port.reading and not exits and not house.closings
    assert house.ties.asked[-1] == ("cancel", str(fault))


def test_what_is_not_on_disk(house: House) -> None:
    """There is no upgrade: the next version would start from the state file, and lose the rest."""
    house.store.fault = "the state cannot be written"
    assert house.succession.unsteady == house.upgrade() == "the state cannot be written"
    assert house.port.reading and not house.ties.asked


def test_a_disk_that_failed_since_the_last_change(house: House) -> None:
    """It is tried again before anything else."""

    def fail(_: object) -> None:
        house.store.fault = "the state cannot be written"

    house.store.event = fail
    assert house.succession.unsteady == "" and house.upgrade() == "the state cannot be written"
    assert house.port.reading and not house.ties.asked


@pytest.mark.parametrize("ends", [False, True])
def test_one_that_is_to_end(ends: bool, house: House, exits: list[int]) -> None:
    """A signal that came while the state was being closed is not forgotten, and the next version ends, too."""
    if ends:
        house.meanwhile = partial(house.clock.callLater, 0, house.arrival.end)
    house.upgrade()
    assert exits == ([] if ends else [0])
    assert ("put" in house.ties.words) is not ends
    assert not ends or house.ties.words[-2:] == ["bye", "cancel"]
    assert not house.port.reading and house.closings == 1


def test_the_end_while_all_is_being_closed(house: House, exits: list[int]) -> None:
    """The end cancels all work on cores, this too: the closing is completed, and nothing comes after it."""
    closing: Deferred[None] = Deferred()
    closed: list[str] = []

    async def close() -> None:
        await closing
        closed.append("the state")

    house.store.close = close
    work = house.begin()
    house.arrival.end()
    work.cancel()
    closing.callback(None)
    house.clock.pump([0.0] * 20)
    assert closed == ["the state"] and not exits and "put" not in house.ties.words
    outcomes: list[object] = []
    work.addBoth(outcomes.append)
    assert outcomes == [""]


def test_an_upgrade_after_the_end_began(house: House, exits: list[int]) -> None:
    house.arrival.end()
    assert house.succession.unsteady == house.upgrade() == "the node is ending"
    assert not exits and not house.closings


def test_a_keeper_that_does_not_take_it(house: House, exits: list[int], logged: list[str]) -> None:
    """Everything is closed by then: the process exits with a failure, so that the keeper starts it again."""
    house.ties.fault = OSError("no answer")
    house.upgrade()
    assert exits == [succession.FAILURE]
    assert any("the next version could not be left all" in line for line in logged)


def test_a_part_that_does_not_close(house: House, exits: list[int], logged: list[str]) -> None:
    """The next version starts from the state file."""

    def fail() -> None:
        raise ZeroDivisionError

    house.meanwhile = fail
    house.upgrade()
    assert exits == [0] and any("could not stop {part} cleanly" in line for line in logged)


def test_an_update_that_began_meanwhile(house: House, exits: list[int]) -> None:
    """It may be replacing the next version's files: the upgrade waits for it."""
    house.updating = "an update of txnode 2 is under way"
    assert house.succession.unsteady == house.upgrade() == "an update of txnode 2 is under way"
    assert house.port.reading and not exits and not house.around.left
    house.updating = ""
    house.upgrade()
    assert exits == [0] and house.around.left


# From the node before


def test_nothing_was_left(house: House) -> None:
    """The node is up as soon as it is ready; there is no outcome of an upgrade."""
    house.take()
    assert (house.arrival.outcome, [*house.arrival.cores]) == (None, [])
    house.arrival.begin()
    assert house.port.reading and not house.inherited and not house.swept
    assert house.ties.asked == [("hello",), ("follow",), ("drop leftover",), ("up", 60.0)]
    assert (house.around.committed, house.shots.calls) == ([None], [("go on", 0), "start"])


def test_signals_that_waited(house: House) -> None:
    """They come when all handles them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
    house.take()
    house.arrival.begin()
    assert not {*WAITING} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("exact", [False, True])
def test_what_was_left(exact: bool, house: House) -> None:
    """Controllers wait until the cores are taken over; the log goes on; from then on this node is the one to go on."""
    ring = LogRing(cast(Any, house.clock), 10)
    ring.event("from before")
    house.take(Handover(exact=exact, ring=ring.packed, run=Run(pid=5), draining=[Run(pid=6), Run()]))
    assert any("from before" in line for line in house.ring.packed.lines)
    assert (house.arrival.outcome, [*house.arrival.cores]) == ("" if exact else None, [5, 6])
    house.arrival.begin()
    assert not house.port.reading and [each.run.pid for each in house.inherited] == [5]
    assert not house.around.committed and "up" not in house.ties.words
    ending: Deferred[None] = ensureDeferred(house.arrival.end_others())
    assert ending.called and ("end others" in house.ties.words) is not exact
    house.arrival.taken([5])
    committed = house.around.committed
    assert (house.swept, committed, house.port.reading) == ([[5]], ["" if exact else None], True)
    assert house.ties.words[-2:] == ["drop leftover", "up"] and house.shots.calls == [("go on", 5), "start"]
    assert any("goes on with the core" in line for line in house.ring.packed.lines)
    # The description is in use no more, but the outcome can still be asked for.
    assert (house.arrival.outcome, [*house.arrival.cores]) == ("" if exact else None, [])


def test_cores_that_are_left_stay(house: House) -> None:
    """All others, of a node without a keeper, end before anything is opened."""
    house.take(Handover(run=Run(pid=5), draining=[Run(pid=6)]))
    Sweep(house.arrival, house.house).start()
    assert house.swept == [[5, 6]]


def test_all_cores_are_taken(house: House) -> None:
    """There is nothing to sweep."""
    house.take(Handover(run=Run(pid=5), draining=[Run(pid=6)]))
    house.arrival.begin()
    house.arrival.taken([6, 5])
    assert not house.swept and any("goes on with 2 cores" in line for line in house.ring.packed.lines)


def test_an_unknown_format(house: House, logged: list[str]) -> None:
    """Nothing of it is used: the core is started again."""
    for content in (Handover(format=FORMAT + 1, run=Run(pid=5)).SerializeToString(), b"\xff\xff"):
        house.ties.held["state"] = [memory_of(content)]
        house.arrival.start()
        assert not house.arrival.cores and house.arrival.outcome is None
    assert [line for line in logged if "unknown format" in line]


def test_a_version_that_failed(house: House) -> None:
    """This one runs again: it goes back to its state, reports the reason, and has the modules of its copy no more."""
    house.environment |= {FAILED: "ImportError: no", PATH: "/lib", "PYTHONPATH": "/copy:/lib"}
    house.take(Handover(exact=True, run=Run(pid=5)))
    assert (house.environment, house.went_back) == ({"PYTHONPATH": "/lib"}, 1)
    assert house.arrival.outcome == "ImportError: no"
    house.arrival.begin()
    assert any("was not upgraded: ImportError: no" in line for line in house.ring.packed.lines)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`signal.pause` does not return: the keeper ends this process."""

    def pause() -> None:
        raise Exited

    monkeypatch.setattr(signal, "pause", pause)


def test_beside_the_version_before(house: House, alone: House) -> None:
    """A version that is tried prepares what is saved before it says that it could go on; others prepare nothing."""
    assert not house.arrival.follows
    house.environment[TRYING] = alone.environment[TRYING] = "yes"
    assert house.arrival.follows and not alone.arrival.follows
    assert house.prepare() == [Saved(b"backend")] and not house.ties.asked
    house.take(Handover(exact=True))
    house.arrival.begin()
    assert not house.arrival.follows


def test_nothing_can_be_prepared(house: House, logged: list[str]) -> None:
    """The upgrade goes on, if slower: whatever is wrong, a version that takes over tells it then."""
    house.saved = None
    assert house.prepare() == [] and not logged
    house.saved, house.unprepared = Saved(b"backend"), CoreFailed("there is no core")
    assert house.prepare() == [] and len(logged) == 1

    async def hang(_: Saved) -> None:
        await Deferred()

    house.leaving.prepare = hang
    preparing = ensureDeferred(house.arrival.prepare())
    house.clock.advance(arrival.AHEAD - 1)
    assert not preparing.called
    house.clock.advance(1)
    assert preparing.called and len(logged) == 2


@pytest.mark.usefixtures("paused")
@pytest.mark.parametrize(
    ("error", "reason"),
    [(SystemExit("no port"), "it ended: no port"), (ZeroDivisionError("a bug"), "ZeroDivisionError")],
)
def test_a_version_that_cannot_start(error: BaseException, reason: str, house: House, alone: House) -> None:
    """The keeper ends it, and receives the reason."""
    with pytest.raises(Exited):
        house.arrival.abandon(Failure(error))
    assert house.ties.words == ["fail"] and reason in str(house.ties.asked[0][1])
    alone.arrival.abandon(Failure(error))


@pytest.mark.usefixtures("paused")
def test_going_back(house: House) -> None:
    """A version that cannot take over a core has the keeper start the one before."""
    house.take(Handover(exact=True, run=Run(pid=5)))
    house.arrival.begin()
    for cannot in (partial(house.arrival.go_back, "no"), partial(house.arrival.failed, "no")):
        with pytest.raises(Exited):
            cannot()
        assert house.ties.asked[-1] == ("fail", "it cannot go on with the core: no")
    assert "up" not in house.ties.words


@pytest.mark.usefixtures("paused")
@pytest.mark.parametrize("again", [False, True])
def test_no_way_back(again: bool, house: House, logged: list[str]) -> None:
    """After a kill, or in the version that runs again: the core is started again."""
    if again:
        house.environment[FAILED] = "ImportError: no"
    house.take(Handover(exact=again, run=Run(pid=5)))
    house.arrival.begin()
    house.arrival.go_back("no")
    house.arrival.failed("no")
    assert house.swept == [[]] and house.port.reading
    assert "fail" not in house.ties.words and house.ties.words[-1] == "up"
    assert any("the core is restarted: {reason}" in line for line in logged)


def test_the_end_while_cores_are_taken(house: House) -> None:
    """Controllers are not let in any more, and no snapshots are written."""
    house.take(Handover(run=Run(pid=5)))
    house.arrival.begin()
    house.arrival.end()
    house.arrival.taken([5])
    assert not house.port.reading and house.shots.calls == ["stop", ("go on", 5)]
    assert house.ties.words.index("bye") < house.ties.words.index("up")


@pytest.mark.usefixtures("paused")
def test_the_end_cancels_taking_over(house: House) -> None:
    """A signal came as soon as the node was ready: it ends in order, and no version before it starts."""
    house.take(Handover(exact=True, run=Run(pid=5)))
    house.arrival.begin()
    house.arrival.end()
    house.arrival.failed("cancelled")
    assert "fail" not in house.ties.words and house.swept == [[]] and not house.port.reading


# Without a keeper


def test_without_a_keeper(alone: House) -> None:
    """Nothing is taken over or held; another version needs a restart."""
    alone.environment |= {PATH: "", "PYTHONPATH": "/copy"}
    alone.take()
    assert alone.environment == {"PYTHONPATH": ""}
    alone.arrival.begin()
    ensureDeferred(alone.arrival.end_others())
    assert alone.around.committed == [None] and alone.port.reading and alone.succession.unsteady == ""
    assert isinstance(found := alone.upgrade(), Refused) and "KEEPER=off" in str(found)
    alone.arrival.end()
    assert not alone.ties.asked


def test_an_empty_ring(house: House) -> None:
    """A node that was killed before its first line has left none."""
    house.take(Handover(ring=Ring()))
    assert house.arrival.outcome is None
