"""`info` reports what goes wrong inside the node, in whichever part."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import MemoryDriver
from node.api.auth import Dialect
from node.api.calls import Call
from node.api.methods import METHODS
from node.base.logs import LogRing
from node.base.part import Part, Parts
from node.contract.saved import Saved
from node.engine.options import EngineOptions
from node.machine import system
from node.machine.system import SystemStats
from node.state.store import Store
from protos.service_pb2 import BaseInfoResponse, Empty
from tests.harness.whole import Whole


class Odd(Part):
    """A part of the node with a warning."""

    @property
    def warnings(self) -> list[str]:
        return ["odd"]


class WarningTests(SynchronousTestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.clock = cast(Any, Clock())
        self.fault: Exception | None = None
        self.system = SystemStats(self.clock, self.sample)
        self.store = Store(self.clock, Path(temporary.name) / "state.db")
        parts = Parts(self.system, Odd())
        self.backend = Whole(
            self.clock, LogRing(self.clock, 100), {0: MemoryDriver(self.clock)}, self.store, EngineOptions(), parts
        )

    def sample(self) -> system.Sample:
        if self.fault:
            raise self.fault
        return system.read_sample()

    def info(self) -> BaseInfoResponse:
        call = Call(METHODS[0], Dialect.DEPLOYED)
        reply: BaseInfoResponse = self.successResultOf(ensureDeferred(self.backend.info(Empty(), call)))
        return reply

    def test_every_part(self) -> None:
        """The machine's statistics, periodic work, and the other parts that the node was made with."""
        self.assertEqual(list(self.info().warnings), ["odd"])
        self.backend.begin(Saved())

        self.fault = OSError("too many open files")
        self.patch(self.backend.engine.keep_alive, "_countdown", None)
        self.clock.pump([1] * 10)
        warnings = "\n".join(self.info().warnings)
        for text in ("saving the remaining keep-alive time failed", "too many open files", "odd"):
            self.assertIn(text, warnings)
        self.flushLoggedErrors(OSError, AttributeError)
