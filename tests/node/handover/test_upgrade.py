"""The steps of an upgrade: checked, waited for, and only then handed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import CancelledError, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.base.errors import InvalidConfig
from node.handover.program import KEPT, Program
from node.handover.upgrade import AGAIN, LOOK, STEADY, Upgrades


@dataclass
class Tried:
    code: int
    lines: Sequence[str]


class Node:
    """Satisfies `node.handover.upgrade.Node`, and records its calls. `late`: what `succeed` returns next."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.late: list[str] = []
        self.updating = ""
        self.fault: Exception | None = None

    @property
    def unsteady(self) -> str:
        return self.updating

    async def succeed(self, _: Program, version: str) -> str:
        self.asked.append(version)
        if self.fault:
            raise self.fault
        return self.late.pop(0) if self.late else ""

    def refuse(self, reason: str) -> None:
        self.asked.append(reason)


class UpgradeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.node = Clock(), Node()
        self.lines = [KEPT, "txnode 2"]
        program = Program(("python", "twistd"), Path("none"))
        self.upgrades = Upgrades(cast(Any, self.clock), cast(Any, self.node), program, self.run_program)

    async def run_program(self, command: Sequence[str], *, seconds: float) -> Tried:
        assert command
        return Tried(0, self.lines)

    def upgrade(self) -> None:
        ensureDeferred(self.upgrades.wanted())

    def test_the_steps(self) -> None:
        """The version on disk is checked, and everything is left to it."""
        self.upgrade()
        self.assertEqual(self.node.asked, ["txnode 2"])

    def test_a_version_without_a_keeper(self) -> None:
        """There is no upgrade, as that version would not go on with what the keeper holds."""
        self.lines = ["txnode 1"]
        self.upgrade()
        [reason] = self.node.asked
        self.assertIn("txnode 1 is from before", str(reason))

    def test_one_that_waits_too_long(self) -> None:
        """It is refused with the obstacle, however it shows."""
        self.node.updating = "an update installs"
        self.upgrade()
        self.clock.pump([LOOK, STEADY, LOOK])
        self.assertEqual(self.node.asked, ["an update installs; ask again later"])
        self.node.asked, self.node.updating, self.node.late = [], "", ["a Start came"] * 3
        self.upgrade()
        self.clock.pump([AGAIN, STEADY, AGAIN])
        self.assertEqual(self.node.asked, [*["txnode 2"] * 3, "a Start came; ask again later"])

    def test_too_early(self) -> None:
        """It is tried again later."""
        self.node.late = ["a Start came"]
        self.upgrade()
        self.assertEqual(self.node.asked, ["txnode 2"])
        self.clock.pump([AGAIN])
        self.assertEqual(self.node.asked, ["txnode 2"] * 2)

    def test_a_core_that_cannot_be_handed_over(self) -> None:
        """There is no upgrade; another one may succeed."""
        self.node.fault = InvalidConfig("the core refuses it")
        self.upgrade()
        self.assertEqual(self.node.asked, ["txnode 2", "the core refuses it"])
        self.node.fault, self.node.asked = None, []
        self.upgrade()
        self.assertEqual(self.node.asked, ["txnode 2"])

    def test_one_that_waits_for_an_update(self) -> None:
        """It checks and executes the version that is on disk by then."""
        self.node.updating = "an update installs"
        self.upgrade()
        self.lines = [KEPT, "txnode 3"]
        self.clock.pump([LOOK] * 5)
        self.assertEqual(self.node.asked, [])
        self.node.updating = ""
        self.clock.pump([LOOK])
        self.assertEqual(self.node.asked, ["txnode 3"])

    def test_a_second_one_joins_the_first(self) -> None:
        """Each caller gets the outcome, and may give up independently."""
        self.node.updating, found = "an update installs", list[str]()
        first, second, third = (ensureDeferred(self.upgrades.wanted()) for _ in range(3))
        for each in (first, second):
            each.addCallback(found.append)
        third.cancel()
        self.failureResultOf(third, CancelledError)
        self.node.updating, self.node.fault = "", InvalidConfig("the core refuses it")
        self.clock.pump([LOOK])
        self.assertEqual(found, ["the core refuses it"] * 2)
        self.assertEqual(self.node.asked, ["txnode 2", "the core refuses it"])

    def test_a_second_one_gets_the_fault_of_the_first(self) -> None:
        """The first one's error is in the log."""
        self.node.updating = "an update installs"
        first, second = (ensureDeferred(self.upgrades.wanted()) for _ in range(2))
        self.node.updating, self.node.fault = "", ZeroDivisionError()
        self.clock.pump([LOOK])
        self.failureResultOf(first, ZeroDivisionError)
        self.assertIn("log", self.successResultOf(second))
