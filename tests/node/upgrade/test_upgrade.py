"""The order of an upgrade: tried, then waited for, rehearsed, and only then left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.errors import InvalidConfig
from node.upgrade.program import SEVERAL, Program, Successor
from node.upgrade.upgrade import AGAIN, LOOK, Upgrades


@dataclass
class Tried:
    code: int
    lines: Sequence[str]


class Node:
    """Satisfies `node.upgrade.upgrade.Node`, and says what was asked of it. `late`: what `succeed` returns next."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.reason = ""
        self.late: list[str] = []
        self.fault: Exception | None = None

    def unsteady(self, several: bool) -> str:
        return "" if several else self.reason

    async def rehearse(self) -> None:
        self.asked.append("rehearse")
        if self.fault:
            raise self.fault

    async def succeed(self, _: Program, successor: Successor) -> str:
        self.asked.append(successor)
        return self.late.pop(0) if self.late else ""

    def refuse(self, reason: str) -> None:
        self.asked.append(reason)


class UpgradeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.node = Clock(), Node()
        self.said = [SEVERAL, "txnode 2"]
        program = Program(("python", "twistd"), Path("none"))
        self.upgrades = Upgrades(cast(Any, self.clock), self.node, program, self.run_program)

    async def run_program(self, command: Sequence[str], *, seconds: float, modules: Path | None = None) -> Tried:
        assert command
        return Tried(0, self.said)

    def upgrade(self) -> None:
        ensureDeferred(self.upgrades.wanted())

    def test_one_that_goes_on_with_several_cores(self) -> None:
        """It waits for none of them; what it would ask is asked before."""
        self.node.reason = "a core drains"
        self.upgrade()
        self.assertEqual(self.node.asked, ["rehearse", Successor("txnode 2", several=True)])

    def test_one_that_goes_on_with_one_alone(self) -> None:
        """It waits until there is no other."""
        self.said, self.node.reason = ["txnode 2"], "a core drains"
        self.upgrade()
        self.clock.pump([LOOK] * 5)
        self.assertEqual(self.node.asked, [])
        self.node.reason = ""
        self.clock.pump([LOOK])
        self.assertEqual(self.node.asked, ["rehearse", Successor("txnode 2", several=False)])

    def test_too_early(self) -> None:
        """Another try is rehearsed anew."""
        self.node.late = ["a Start came"]
        self.upgrade()
        self.assertEqual(len(self.node.asked), 2)
        self.clock.pump([AGAIN])
        self.assertEqual(self.node.asked, ["rehearse", Successor("txnode 2", several=True)] * 2)

    def test_what_could_not_go_on(self) -> None:
        """There is no upgrade, and nothing is left."""
        self.node.fault = InvalidConfig("the core refuses it")
        self.upgrade()
        self.assertEqual(self.node.asked, ["rehearse", "the core refuses it"])
        self.node.fault, self.node.asked = None, []
        self.upgrade()
        self.assertEqual(len(self.node.asked), 2)
