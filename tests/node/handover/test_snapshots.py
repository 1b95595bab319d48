"""The snapshots that the next node goes on with after a kill: when they are written, and what they say."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node import __version__
from node.base.logs import LogRing
from node.contract.driver import Generation
from node.contract.generations import Generations
from node.handover.snapshots import FORMAT, PAUSE, SHARE, Snapshots, memory_of
from protos.handover_pb2 import Handover, Run
from tests.harness.held_here import HeldHere


class FullKeeper(HeldHere):
    """Counts what is put; `fault` fails it."""

    def __init__(self) -> None:
        super().__init__()
        self.puts = 0
        self.fault: OSError | None = None

    def put(self, name: str, descriptors: Collection[int]) -> None:
        if self.fault is not None:
            raise self.fault
        self.puts += 1
        super().put(name, [*descriptors])


class Traffic:
    """`flushes`: each flush so far; it ends with whether the disk has everything."""

    def __init__(self) -> None:
        self.followed: list[Mapping[Generation, str]] = []
        self.flushes: list[Deferred[bool]] = []
        self.forgotten = 0

    def follow(self, runs: Mapping[Generation, str]) -> None:
        self.followed.append(runs)

    async def flushed(self) -> bool:
        self.flushes.append(Deferred())
        return await self.flushes[-1]

    def forget_others(self) -> None:
        self.forgotten += 1


class Backend:
    """Stands for `Leaving`: each run is its own mark."""

    def __init__(self) -> None:
        self.generations = Generations()
        self.traffic = Traffic()
        self.described = 0
        self.users = b""

    def marks(self) -> Mapping[Generation, str]:
        runs = filter(None, (self.generations.current, *self.generations.draining, *self.generations.taking_over))
        return {run: str(run) for run in runs}

    def describe(self, saved: Collection[Generation]) -> Handover:
        self.described += 1
        runs = [Run(mark=mark, saved=run in saved, core=self.users) for run, mark in self.marks().items()]
        return Handover(run=runs[0] if runs else None, draining=runs[1:])


def run(name: str) -> Generation:
    return cast(Generation, name)


class SnapshotTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.keeper, self.backend = Clock(), FullKeeper(), Backend()
        self.ring = LogRing(cast(Any, self.clock), 10)
        self.snapshots = Snapshots(self.clock, self.keeper, cast(Any, self.backend), self.ring)
        self.addCleanup(self.keeper.close)

    @property
    def written(self) -> Handover:
        [memory] = self.keeper.held["state"]
        return Handover.FromString(os.pread(memory, 1 << 20, 0))

    @property
    def runs(self) -> list[tuple[str, bool]]:
        """The marks of the runs, and whether their counters are on disk."""
        written = self.written
        return [(each.mark, each.saved) for each in (written.run, *written.draining)]

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.125] * int(seconds * 8))

    def test_at_once(self) -> None:
        """When a run takes over, before it gets its first connection; and when one has gone."""
        self.snapshots.start()
        self.backend.generations.adopt(run("old"))
        self.assertEqual((self.runs, self.backend.traffic.followed), ([("old", False)], [{"old": "old"}]))
        self.backend.generations.come(run("new"))
        self.assertEqual(self.runs, [("old", False)])
        self.backend.generations.take_over(run("new"))
        self.assertEqual(self.runs, [("old", False), ("new", False)])
        self.backend.generations.adopt(run("new"))
        self.assertEqual(self.runs, [("new", False), ("old", False)])
        self.backend.generations.gone(run("old"))
        self.assertEqual(self.runs, [("new", False)])
        self.assertEqual((self.written.format, self.written.version, self.written.exact), (FORMAT, __version__, False))

    def test_every_second(self) -> None:
        """Whatever else has changed; not if nothing has."""
        self.backend.generations.adopt(run("a"))
        self.snapshots.start()
        puts = self.keeper.puts
        self.pass_time(5)
        self.assertEqual(self.keeper.puts, puts)
        self.backend.users = b"ann"
        self.pass_time(PAUSE)
        self.assertEqual((self.keeper.puts, self.written.run.core), (puts + 1, b"ann"))
        self.ring.event("a line")
        self.pass_time(PAUSE)
        self.assertIn("a line", self.written.ring.lines[-1])
        self.assertEqual(self.keeper.puts, puts + 2)

    def test_saved_counters(self) -> None:
        """The disk has those of a run from the first flush on that was begun for it, and did not fail."""
        self.backend.generations.adopt(run("a"))
        self.snapshots.start()
        [flush] = self.backend.traffic.flushes
        self.assertEqual((self.runs, self.backend.traffic.forgotten), ([("a", False)], 0))
        flush.callback(True)
        self.assertEqual((self.runs, self.backend.traffic.forgotten), ([("a", True)], 1))
        self.backend.generations.adopt(run("b"))
        self.assertEqual(self.runs, [("b", False), ("a", True)])
        # Another run comes before this flush ends: it is not in it.
        self.backend.generations.adopt(run("c"))
        _, early, late = self.backend.traffic.flushes
        early.callback(True)
        self.assertEqual((self.runs, self.backend.traffic.forgotten), ([("c", False), ("a", True), ("b", False)], 1))
        late.callback(False)
        self.pass_time(2)
        self.assertEqual((self.runs, self.backend.traffic.forgotten), ([("c", False), ("a", True), ("b", False)], 1))

    def test_a_flush_that_breaks(self) -> None:
        """It is logged, and the counters are not taken to be on disk."""
        self.backend.generations.adopt(run("a"))
        self.snapshots.start()
        self.backend.traffic.flushes[0].errback(ZeroDivisionError())
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(self.runs, [("a", False)])

    def test_large_snapshots_come_less_often(self) -> None:
        """Each takes a small part of the time at most."""
        took = 0.0

        def spent() -> float:
            nonlocal took
            took += 0.5
            return took

        self.patch(time, "thread_time", spent)
        self.snapshots.start()
        self.clock.advance(PAUSE)
        [due] = self.clock.getDelayedCalls()
        self.assertEqual(due.getTime() - self.clock.seconds(), 0.5 / SHARE)

    def test_a_keeper_without_memory(self) -> None:
        """It is logged; the next snapshot is tried as usual."""
        self.snapshots.start()
        self.keeper.fault = OSError("no space left")
        self.backend.generations.adopt(run("a"))
        self.pass_time(2)
        self.keeper.fault = None
        self.pass_time(PAUSE)
        self.assertEqual(self.runs, [("a", False)])
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 1)

    def test_the_end(self) -> None:
        """Nothing is written any more: from here on the node leaves everything exactly, or all ends."""
        self.backend.generations.adopt(run("a"))
        self.snapshots.start()
        puts = self.keeper.puts
        self.snapshots.stop()
        self.backend.generations.adopt(run("b"))
        self.backend.traffic.flushes[0].callback(True)
        self.pass_time(5)
        self.assertEqual((self.keeper.puts, self.clock.getDelayedCalls()), (puts, []))
        self.snapshots.stop()

    def test_it_was_never_begun(self) -> None:
        self.snapshots.stop()
        self.backend.generations.adopt(run("a"))
        self.assertEqual((self.keeper.puts, self.clock.getDelayedCalls()), (0, []))

    def test_until_the_first_one(self) -> None:
        """What the node before has left is kept as after a kill: its counters are those on disk."""
        runs = [Run(mark=mark, pid=pid, counters={"up": 1}, core=b"core") for pid, mark in enumerate("ab")]
        ring = LogRing(cast(Any, self.clock), 10)
        ring.event("a line")
        left = Handover(exact=True, format=FORMAT, run=runs[0], draining=runs[1:], common=b"common", ring=ring.packed)
        self.snapshots.go_on(left)
        found = self.written
        self.assertEqual((found.exact, found.common, found.format), (False, b"", FORMAT))
        self.assertEqual([dict(each.counters) for each in (found.run, *found.draining)], [{}, {}])
        self.assertEqual([each.core for each in (found.run, *found.draining)], [b"core"] * 2)
        self.assertEqual(found.ring, left.ring)
        # It belongs to the caller.
        self.assertTrue(left.exact and left.run.counters)

    def test_memory(self) -> None:
        """A memory file has all of a large content, and is not inherited."""
        content = os.urandom(3 << 20)
        memory = memory_of(content)
        self.assertEqual(os.pread(memory, len(content) + 1, 0), content)
        self.assertFalse(os.get_inheritable(memory))
        os.close(memory)

    def test_no_memory(self) -> None:
        """Nothing stays open."""
        made: list[int] = []
        create = os.memfd_create

        def full(*_: object) -> int:
            raise OSError("no space left")

        def made_of(name: str, flags: int) -> int:
            made.append(create(name, flags))
            return made[-1]

        self.patch(os, "memfd_create", made_of)
        self.patch(os, "write", full)
        with self.assertRaises(OSError):
            memory_of(b"content")
        [memory] = made
        with self.assertRaises(OSError):
            os.fstat(memory)
