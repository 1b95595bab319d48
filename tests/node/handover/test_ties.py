"""The node's end of the sockets to its keeper, whose requests here meet the real keeper's answers or prepared ones."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock

from node.handover import keeper, ties
from node.handover.keeper import FEW, VARIABLE, VERSION, Keeper, Node
from node.handover.launch import words_of
from node.handover.ties import ALIVE, ENDED, LOOK, Ties
from scripts.staging.process import tied
from scripts.staging.wait import until
from tests.harness.open_files import many_files, room_for
from tests.node.handover.test_keeper import Kept


class Reading(Clock):
    """A reactor that reads when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[Any] = []

    def addReader(self, reader: Any) -> None:
        self.readers.append(reader)


def pair() -> tuple[socket.socket, socket.socket]:
    found = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in found:
        each.settimeout(10)
    return found


class Ends:
    """Both ends of the sockets: `ties` is the node's."""

    def __init__(self) -> None:
        (self.ask, its_ask), (self.events, its_events) = pair(), pair()
        self.ties = Ties(its_ask, its_events)
        self._its = its_ask, its_events

    def close(self) -> None:
        for each in (self.ask, self.events, *self._its):
            each.close()

    def answer(self, message: object, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self.ask, [json.dumps(message).encode()], descriptors)

    def tell(self, message: object) -> None:
        self.events.send(json.dumps(message).encode())

    @property
    def is_silent(self) -> bool:
        """Whether no request waits."""
        return not select.select([self.ask], [], [], 0)[0]

    def asked(self) -> Any:
        """The next request."""
        words, descriptors, *_ = socket.recv_fds(self.ask, keeper.MESSAGE, FEW)
        for descriptor in descriptors:
            os.close(descriptor)
        return json.loads(words)


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.close()


class Served(Ends):
    """The real keeper answers, in a thread. It starts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper(({}, ["/bin/true"]))
        self.node = Node(self.keeper.command, os.getpid(), self.ask, self.events)
        self.asked_for: list[str] = []
        self._over, self._its_over = os.pipe()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self.ask, select.POLLIN)
        poll.register(self._over, select.POLLIN)
        while self._over not in dict(poll.poll()):
            self.keeper.hear(self.node)

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._its_over, b"x")
        self._thread.join()
        self.keeper.drop(*self.keeper.held)
        for each in (self._over, self._its_over):
            os.close(each)
        self.close()

    def next_node(self) -> Ties:
        """The next node, which finds what is held."""
        self.ties = Ties(*self._its)
        self.ties.hello()
        return self.ties


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as found:
        yield found


@pytest.fixture
def core() -> Iterator[subprocess.Popen[bytes]]:
    with tied(["/bin/sleep", "100"]) as process:
        yield process
        process.kill()


def is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").exists()


def memory(content: bytes) -> int:
    found = os.memfd_create("test")
    os.write(found, content)
    return found


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, 100, 0)


def inodes(descriptors: Sequence[int]) -> list[int]:
    return [os.fstat(each).st_ino for each in descriptors]


# Inherited


def test_it_is_inherited(ends: Ends) -> None:
    """It leaves the environment, and what this process starts does not inherit it; only the keeper's child has it."""
    ask, events = (os.dup(each.fileno()) for each in ends._its)
    for number in (ask, events):
        os.set_inheritable(number, True)
    environment = {VARIABLE: f"{ask} {events} {os.getppid()}", "ONE": "two"}
    found = Ties.of(environment)
    assert found and environment == {"ONE": "two"} and found.lasts
    assert not os.get_inheritable(ask) and not os.get_inheritable(events)
    found.alive()
    assert ends.asked() == {"do": "alive"}
    assert found.fileno() == events and found.logPrefix()
    found._ask.close()
    found._events.close()
    assert Ties.of({}) is None


def test_a_keeper_of_another_process(ends: Ends) -> None:
    """A node that a core or a user has started from the environment of another one has no keeper."""
    environment = {VARIABLE: f"0 1 {os.getpid()}"}
    assert Ties.of(environment) is None and not environment


# Requests


def test_what_is_held(served: Served) -> None:
    """The next node takes each by its name, once, and it is its own."""
    one, two = memory(b"one"), memory(b"two")
    served.ties.hello()
    served.ties.put("both", [one, two])
    served.ties.put("state", [one])
    served.ties.put("state", [two])
    served.ties.put("gone", [one])
    served.ties.drop(["gone", "missing"])
    served.ties.drop([])
    assert served.ties.take("both") == []
    found = served.next_node()
    both, state = found.take("both"), found.take("state")
    assert ([*map(content, both)], [*map(content, state)]) == ([b"one", b"two"], [b"two"])
    assert found.take("both") == found.take("gone") == []
    assert not any(map(os.get_inheritable, both))
    for each in (one, two, *both, *state):
        os.close(each)


def test_many_descriptors(served: Served) -> None:
    """They go in parts, in their order."""
    memories = [memory(b"") for _ in range(7)]
    many = [memories[number % 7] for number in range(2 * FEW + 100)]
    with room_for(3 * len(many)):
        served.ties.put("many", many)
        served.ties.put("few", many[:FEW])
        found = served.next_node()
        taken, few = found.take("many"), found.take("few")
        there = inodes(taken), inodes(few)
        expected = inodes(many), inodes(many[:FEW])
        for each in (*memories, *taken, *few):
            os.close(each)
    assert there == expected


def test_what_is_left_over(served: Served, core: subprocess.Popen[bytes]) -> None:
    """All that was not taken is closed on both sides, and cores among it are killed."""
    one = memory(b"one")
    for name in ("taken", "left"):
        served.ties.put(name, [one])
    served.keeper.cores[core.pid] = None
    served.keeper.held[f"core/{core.pid}"] = [os.pidfd_open(core.pid), os.dup(one), os.dup(one)]
    found = served.next_node()
    taken = found.take("taken")
    held = [each for some in found._held.values() for each in some]
    assert len(held) == 4
    found.drop_leftover()
    assert core.wait(10) == -signal.SIGKILL
    assert not any(map(is_open, held)) and is_open(*taken)

    assert {*served.keeper.held} == {"taken"} and not served.keeper.cores
    found.drop_leftover()
    for each in (one, *taken):
        os.close(each)


def test_coming_up(served: Served) -> None:
    served.ties.hello()
    served.ties.up(7.0)
    assert (served.node.is_up, served.keeper.seconds, served.keeper.command) == (True, 7.0, served.node.command)
    served.ties.bye()
    assert served.node.ends


@pytest.mark.parametrize("version", [VERSION, VERSION - 1, VERSION + 1])
def test_a_keeper_of_another_version(version: int, ends: Ends) -> None:
    """An older one executes this version's when this one is the node to go on with; a newer one knows our words."""
    ends.answer({"n": 1, "version": version, "names": [], "exits": {}})
    for number in (2, 3):
        ends.answer({"n": number})
    ends.ties.hello()
    ends.ties.up(300.0)
    assert [ends.asked(), ends.asked()] == [{"do": "hello", "n": 1}, {"do": "up", "n": 2, "seconds": 300.0}]
    if version < VERSION:
        assert ends.asked() == {"do": "become", "n": 3, "argv": words_of(keeper.__file__)}
    assert ends.is_silent


def test_the_words_of_requests(ends: Ends) -> None:
    """Reasons become environment variables: they have no characters that these cannot have."""
    for number in range(1, 8):
        ends.answer({"n": number})
    ends.ties.start_next(({"A": "b"}, ["next"]), ({}, ["plain"]), ({}, ["back"]), 30.0, lambda _: None)
    assert ends.asked() == {
        "do": "next", "n": 1, "command": [{"A": "b"}, ["next"]], "plain": [{}, ["plain"]], "back": [{}, ["back"]],
            "patience": 30.0
    }  # fmt: skip
    ends.ties.cancel_next("a Start came")
    assert ends.asked() == {"do": "cancel", "n": 2, "reason": "a Start came"}
    ends.ties.fail("a\0b \udc80 ü")
    assert ends.asked() == {"do": "failed", "n": 3, "reason": "a b \\udc80 \\xfc"}
    ends.ties.alive("READY=1")
    assert ends.asked() == {"do": "alive", "text": "READY=1"}
    ends.ties.forget(7)
    assert ends.asked() == {"do": "forget", "n": 4, "pid": 7}


def test_a_core_is_started(ends: Ends) -> None:
    """Its descriptors go by their numbers in it; its pidfd and outputs come."""
    descriptors = [memory(b"%d" % number) for number in range(3)]
    ends.answer({"n": 1, "pid": 7}, descriptors)
    found = ends.ties.spawn(("core", "run"), {"ONE": "two"}, {0: descriptors[0], 5: descriptors[1]})
    assert (found.pid, content(found.pidfd), found.ended) == (7, b"0", False)
    assert {number: content(each) for number, each in found.outputs.items()} == {1: b"1", 2: b"2"}
    assert ends.asked() == {
        "do": "spawn", "n": 1, "argv": ["core", "run"], "environment": {"ONE": "two"}, "targets": [0, 5]
    }  # fmt: skip
    for each in (*descriptors, found.pidfd, *found.outputs.values()):
        os.close(each)


def test_a_late_answer(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is skipped by the next request: its descriptors are closed, and the core that was started for it is ended."""
    reading, writing = os.pipe()
    with monkeypatch.context() as inside:
        inside.setattr(Ties._request, "__defaults__", ((), 0.01))
        for _ in range(2):
            with pytest.raises(TimeoutError):
                ends.ties.spawn(["core"], {}, {})
    ends.answer({"more": True}, [writing] * 2)
    ends.answer({"n": 1, "pid": 7}, [writing])
    ends.answer({"n": 2, "pid": 8}, [writing] * 3)
    ends.answer({"n": 3, "pid": 9}, [reading] * 3)
    found = ends.ties.spawn(["core"], {}, {})
    assert found.pid == 9 and inodes([found.pidfd]) == inodes([reading])
    assert [ends.asked()["n"] for _ in range(3)] == [1, 2, 3]
    assert [ends.asked(), ends.asked()] == [{"do": "forget", "pid": pid} for pid in (7, 8)] and ends.is_silent
    os.close(writing)
    # No end of the pipe to write to is left.
    assert os.read(reading, 1) == b""
    for each in (reading, found.pidfd, *found.outputs.values()):
        os.close(each)


def test_a_core_that_is_started_late(tmp_path: Path) -> None:
    """The node has given up on it by then: the keeper ends it."""
    with ExitStack() as stack:
        kept = Kept(tmp_path, stack)
        node = kept.node()
        node.up()
        found, children = Ties(node.ask, node.events), psutil.Process(kept.process.pid).children
        with kept.stopped(), pytest.raises(TimeoutError):
            found._request("spawn", within=0.01, argv=["/bin/sleep", "100"], environment={}, targets=[])
        until(lambda: len(children()) == 2, 10, "the core is started all the same")
        found.put("name", [node.ask.fileno()])
        until(lambda: [child.pid for child in children()] == [node.pid], 10, "it is ended")


def test_many_threads(served: Served) -> None:
    """Each gets the answer to its own request."""
    one = memory(b"one")

    def work(number: int) -> None:
        for _ in range(20):
            served.ties.put(f"name/{number}", [one])
            served.ties.alive()

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(work, number) for number in range(4)]:
            each.result(30)
    assert {*served.keeper.held} == {f"name/{number}" for number in range(4)}
    os.close(one)


def test_a_keeper_that_has_ended(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request fails at once, and so does the reading of events: the node ends."""
    ends.ask.close()
    ends.events.close()
    with pytest.raises(OSError):
        ends.ties.alive()
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    ends.ties.doRead()
    assert exits == [1]


def test_hello_waits_for_the_node_before(ends: Ends) -> None:
    """However long that takes to end; nothing else is waited for so long."""
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(ends.ties.hello)
        assert ends.asked()["do"] == "hello" and not work.done()
        assert ends._its[0].gettimeout() is None
        ends.answer({"n": 1, "version": VERSION, "names": [], "exits": {}})
        work.result(10)
    ends.ties.alive()
    assert ends._its[0].gettimeout() == ties.ANSWER


# Signs of life


def test_signs_of_life(ends: Ends) -> None:
    """From the beginning, until the end."""
    reactor = Reading()
    for number in range(1, 10):
        ends.answer({"n": number})
    ends.ties.follow(reactor)
    assert reactor.readers == [ends.ties]
    reactor.pump([ALIVE] * 3)
    asked = [ends.asked()["do"] for _ in range(3)]
    assert asked == ["alive"] * 3
    ends.ties.bye()
    rest = [ends.asked()["do"]]
    while rest[-1] != "bye":
        rest.append(ends.asked()["do"])
    reactor.pump([ALIVE] * 3)
    assert ends.is_silent


# The ends of cores


class Following(Ends):
    """The node follows the ends of cores."""

    def __init__(self, exits: dict[int, int] | None = None) -> None:
        super().__init__()
        self.reactor = Reading()
        self.answer({"n": 1, "version": VERSION, "names": [], "exits": exits or {}})
        self.ties.hello()
        self.asked()
        self.statuses: list[tuple[int, int]] = []
        for number in range(2, 20):
            self.answer({"n": number})
        self.ties.follow(self.reactor)

    def when_exited(self, pid: int) -> None:
        self.ties.when_exited(pid, lambda status: self.statuses.append((pid, status)))

    @property
    def forgotten(self) -> list[int]:
        found = []
        while not self.is_silent:
            if (asked := self.asked())["do"] == "forget":
                found.append(asked["pid"])
        return found


@pytest.fixture
def following() -> Iterator[Following]:
    found = Following()
    yield found
    found.close()


def test_an_end_after_it_was_asked_for(following: Following) -> None:
    """It is reported once, and the keeper needs to keep it no longer."""
    following.when_exited(7)
    following.tell({"exited": 8, "status": 1})
    following.ties.doRead()
    assert following.statuses == [] and following.forgotten == []
    following.tell({"exited": 7, "status": 9})
    following.ties.doRead()
    assert (following.statuses, following.forgotten) == ([(7, 9)], [7])


def test_an_end_before_it_is_asked_for(following: Following) -> None:
    """It is reported soon, but not at once: the caller is not ready yet."""
    following.tell({"exited": 7, "status": 9})
    following.ties.doRead()
    following.when_exited(7)
    assert following.statuses == []
    following.reactor.advance(0)
    assert (following.statuses, following.forgotten) == ([(7, 9)], [7])
    following.reactor.advance(5)
    assert following.statuses == [(7, 9)]


def test_an_end_while_no_node_lived() -> None:
    """It comes with what is held."""
    following = Following({7: 9})
    following.when_exited(7)
    following.reactor.advance(0)
    assert following.statuses == [(7, 9)]
    following.close()


def test_an_end_in_both_ways() -> None:
    """The event of an end that was reported already does nothing."""
    following = Following({7: 9})
    following.when_exited(7)
    following.tell({"exited": 7, "status": 9})
    following.ties.doRead()
    following.reactor.advance(0)
    assert (following.statuses, following.forgotten) == ([(7, 9)], [7])
    following.close()


def test_no_event(following: Following) -> None:
    """The reactor may call too early; other events are the next version's, or not known."""
    following.ties.doRead()
    heard: list[str] = []
    following.ties._said = [heard.append]
    for event in ({"next": ""}, {"another": 1}, {"next": "it ended"}):
        following.tell(event)
        following.ties.doRead()
    assert heard == ["", "it ended"]
    following.ties.connectionLost()


def test_cores_that_are_held(core: subprocess.Popen[bytes]) -> None:
    """Each is taken over once, with whether it has ended."""
    ends, one = Ends(), memory(b"one")
    names = [[f"core/{pid}", 3] for pid in (7, 8)]
    ends.answer({"n": 1, "version": VERSION, "names": names, "exits": {"8": 256}}, [one] * 6)
    ends.ties.hello()
    runs, ended = ends.ties.spawned(7), ends.ties.spawned(8)
    assert runs and ended and (runs.ended, ended.ended) == (False, True)
    assert ends.ties.spawned(7) is None and ends.ties.spawned(9) is None
    for each in (one, runs.pidfd, ended.pidfd, *runs.outputs.values(), *ended.outputs.values()):
        os.close(each)
    ends.close()


def ending(found: Ties, reactor: Clock) -> Deferred[None]:
    found._reactor = reactor
    return ensureDeferred(cast(Any, found.end_others()))


def pump(reactor: Clock, done: Deferred[None]) -> None:
    """Let cores end, in much less time than they have by the reactor's clock."""

    def step() -> bool:
        reactor.advance(LOOK / 100)
        return bool(done.called)

    until(step, 10, "they have ended")


def left(served: Served, *pids: int) -> Ties:
    """The next node, for which these cores are held."""
    for pid in pids:
        served.keeper.held[f"core/{pid}"] = [os.pidfd_open(pid), *(os.open(os.devnull, os.O_RDONLY) for _ in "oe")]
    return served.next_node()


def test_others_end(served: Served, core: subprocess.Popen[bytes]) -> None:
    """Cores that were not taken are killed, and have ended when it returns; the others live."""
    with tied(["/bin/sleep", "100"]) as other:
        found, reactor = left(served, core.pid, other.pid), Clock()
        taken = found.spawned(core.pid)
        assert taken
        done = ending(found, reactor)
        pump(reactor, done)
        assert (other.poll(), core.poll()) == (-signal.SIGKILL, None)
        # A process that has ended and was reaped is no obstacle.
        again = ending(found, reactor)
        assert again.called
        found.drop_leftover()
        for each in (taken.pidfd, *taken.outputs.values()):
            os.close(each)


def test_one_that_does_not_end(served: Served, core: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hang in the kernel: the node goes on after a while."""
    send: Callable[[int, int], None] = lambda pidfd, number: None  # noqa: E731
    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    found, reactor = left(served, core.pid), Clock()
    done = ending(found, reactor)
    reactor.advance(ENDED / 2)
    assert not done.called
    reactor.pump([LOOK] * int(ENDED / 2 / LOOK + 2))
    assert done.called
    found.drop_leftover()


def test_others_among_very_many_descriptors(served: Served, core: subprocess.Popen[bytes]) -> None:
    """A busy node has thousands."""
    with many_files(1100):
        found, reactor = left(served, core.pid), Clock()
        done = ending(found, reactor)
        pump(reactor, done)
        failures: list[object] = []
        done.addErrback(failures.append)
        assert not failures
        found.drop_leftover()
