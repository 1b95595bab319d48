"""A refusal of the kernel is a line in the log, a warning in `info`, and a finding of the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.task import Clock
from twisted.logger import ILogObserver, LogLevel, formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from node.base.part import Parts
from node.doctor import running
from node.doctor.findings import Check, Level
from node.machine.mechanisms import Mechanisms
from protos.service_pb2 import BaseInfoResponse
from tests.node.updates.pool import pooled

LOST = "steering, so a change ends all connections: Operation not permitted"


class MechanismsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.logged: list[str] = []

        @implementer(ILogObserver)
        def observe(event: Any) -> None:
            if event["log_level"] is LogLevel.warn:
                self.logged.append(formatEvent(event))

        globalLogPublisher.addObserver(observe)
        self.addCleanup(globalLogPublisher.removeObserver, observe)
        self.tried = 0

    def parts(self, refused: Sequence[str] = ()) -> Parts:
        """A node that has begun."""

        def attempt() -> Sequence[str]:
            self.tried += 1
            return refused

        parts = Parts(Mechanisms(pooled(Clock()), attempt))
        parts.start()
        self.assertEqual(self.tried, 0, "not before the node serves")
        parts.begin()
        return parts

    def test_a_refusal(self) -> None:
        """It is tried once, and reported in each place once."""
        parts = self.parts([LOST, "another, so that"])
        line = f"the kernel refuses {LOST}"
        self.assertEqual(parts.warnings, [line, "the kernel refuses another, so that"])
        [logged] = [each for each in self.logged if LOST in each]
        self.assertEqual(logged, f"{line}; docs/install.md has what it needs")
        found = list(running.node(BaseInfoResponse(state="running", warnings=[*parts.warnings, "else"]), [], 0))
        kernel = [each for each in found if each.check is Check.MECHANISMS]
        self.assertEqual([(each.level, each.found) for each in kernel], [(Level.WARN, each) for each in parts.warnings])
        self.assertIn("docs/install.md", kernel[0].document["remedy"])
        self.assertEqual([each.found for each in found if each.check is Check.WARNINGS], ["else"])
        self.assertEqual(self.tried, 1)

    def test_nothing_is_refused(self) -> None:
        self.assertEqual(self.parts().warnings, [])
        self.assertEqual(self.logged, [])

    def test_it_cannot_be_tried(self) -> None:
        """The node serves all the same, and the log says it."""

        def fail() -> Sequence[str]:
            raise ZeroDivisionError

        parts = Parts(Mechanisms(pooled(Clock()), fail))
        parts.begin()
        self.assertEqual(parts.warnings, [])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
