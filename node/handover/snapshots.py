"""The memory file that the next node goes on with if this one dies: written when the runs change, and every second."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError
from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node import __version__
from node.base.alarm import Alarm
from node.base.governor import Governor
from node.base.logs import Logger, LogRing
from node.contract.driver import Generation
from node.contract.generations import Follower
from node.contract.keeper import Keeper
from node.engine.leaving import Leaving
from protos.handover_pb2 import Handover

# The format of `Handover`; others are not read.
FORMAT = 3
# Seconds between two snapshots at least, and the part of the time that they may take.
PAUSE, SHARE = 1.0, 0.01


class Snapshots(Follower):
    """Writes them from `start` on."""

    log = Logger()

    def __init__(self, reactor: IReactorTime, keeper: Keeper, leaving: Leaving, ring: LogRing) -> None:
        self._keeper = keeper
        self._leaving = leaving
        self._ring = ring
        # The runs as they were described last, and those whose counters are on disk under their marks.
        self._seen: Sequence[Generation] = ()
        self._saved: frozenset[Generation] = frozenset()
        self._written = b""
        # Why the last one failed.
        self._fault = ""
        self._next = Alarm(reactor, self._tick)
        self._governor = Governor(reactor, SHARE, shortest=PAUSE)
        self._on = False

    def go_on(self, left: Handover) -> None:
        """Keep what the node before has left, as of a node that was killed: its counters are on disk."""
        standing = Handover()
        standing.CopyFrom(left)
        standing.ClearField("common")
        standing.exact = False
        for run in (standing.run, *standing.draining):
            run.ClearField("counters")
        self._put(standing)

    def start(self) -> None:
        self._on = True
        self._leaving.generations.follow(self)
        self.moved()
        self._next.set(PAUSE)

    def stop(self) -> None:
        self._on = False
        self._next.cancel()

    def moved(self) -> None:
        """Write at once: the kernel is about to give a run that takes over its first connection."""
        marks = self._leaving.marks()
        if self._on and (seen := tuple(marks)) != self._seen:
            self._seen = seen
            self._leaving.traffic.follow(marks)
            self._write()
            ensureDeferred(self._save(marks)).addErrback(self._failed)

    def _failed(self, failure: Failure) -> None:
        self.log.failure("no snapshot of the cores: if the node dies now, the next one starts them again", failure)

    async def _save(self, marks: Mapping[Generation, str]) -> None:
        """Note that the counters of these runs are on disk, if they are, and only those are needed."""
        if await self._leaving.traffic.flushed() and tuple(marks) == self._seen:
            self._saved = frozenset(marks)
            self._write()
            self._leaving.traffic.forget_others()

    def _write(self) -> None:
        if not self._on:
            return
        try:
            handover = self._leaving.describe(saved=self._saved)
            handover.format, handover.version = FORMAT, __version__
            handover.ring.CopyFrom(self._ring.packed)
            self._put(handover)
            self._fault = ""
        except Exception as error:  # noqa: BLE001 - logged; the next one may succeed
            if str(error) != self._fault:
                self._fault = str(error)
                text = "no snapshot of the cores: if the node dies now, the next one starts them again: {error}"
                self.log.failure(text, error=self._fault)

    def _put(self, handover: Handover) -> None:
        if (packed := handover.SerializeToString()) != self._written:
            memory = memory_of(packed)
            try:
                self._keeper.put("state", [memory])
            finally:
                os.close(memory)
            self._written = packed

    def _tick(self) -> None:
        began = time.thread_time()
        self._write()
        took = time.thread_time() - began
        self._next.set(self._governor.rest(took))


def memory_of(packed: bytes) -> int:
    """A memory file with this content. Raises `OSError`."""
    memory = os.memfd_create("txnode-state", os.MFD_CLOEXEC)
    content = memoryview(packed)
    try:
        while content:
            content = content[os.write(memory, content) :]
    except OSError:
        os.close(memory)
        raise
    return memory


def read_memory(memory: int) -> Handover:
    """Parse and close what a node has left; nothing if its format is unknown."""
    with os.fdopen(memory, "rb") as file:
        content = os.pread(memory, os.fstat(file.fileno()).st_size, 0)
    try:
        found = Handover.FromString(content)
    except DecodeError:
        found = Handover()
    if found.format == FORMAT:
        return found
    Snapshots.log.warn("what the node before has left has an unknown format: the core is restarted")
    return Handover()
