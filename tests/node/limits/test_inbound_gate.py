"""Which cores have their inbounds closed, opened and emptied, whatever comes and goes."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import Gate, MemoryGeneration, MemoryPlan
from node.base.errors import CoreFailed
from node.contract.generations import Generations
from node.limits.node_quota import InboundGate


class Closable(MemoryGeneration):
    """A core that notes the calls."""

    open_ports = (443,)

    def __init__(self) -> None:
        super().__init__(Clock(), MemoryPlan("", ()), {}, Gate())
        self.done: list[str] = []
        self.fault = ""

    async def close_door(self, *, empty: bool = False) -> None:
        self._note("emptied" if empty else "closed")

    async def open_door(self) -> None:
        self._note("opened")

    def _note(self, word: str) -> None:
        if self.fault:
            raise CoreFailed(self.fault)
        self.done.append(word)


class DoorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.generations = Generations()
        self.door = InboundGate(self.generations)

    def adopted(self) -> Any:
        run: Any = Closable()
        self.generations.adopt(run)
        return run

    def keep(self) -> None:
        self.successResultOf(ensureDeferred(self.door.keep()))

    def test_running_cores_are_closed_and_new_ones_also_emptied(self) -> None:
        old = self.adopted()
        self.door.set(True)
        self.assertEqual(old.done, ["closed"])
        new = self.adopted()
        self.assertEqual((old.done, new.done), (["closed"] * 2, ["emptied"]))
        for _ in range(2):
            self.keep()
        self.assertEqual(new.done, ["emptied", "emptied", "closed"])
        self.assertEqual(old.done, ["closed"] * 4)
        self.door.set(False)
        self.assertEqual((old.done[-1], new.done[-1]), ("opened", "opened"))
        self.keep()
        self.assertEqual((old.done.count("opened"), new.done.count("opened")), (1, 1))

    def test_closed_before_a_core_runs(self) -> None:
        self.door.set(True)
        self.assertEqual(self.adopted().done, ["emptied"])

    def test_open_from_the_start(self) -> None:
        """No core is touched."""
        run = self.adopted()
        self.door.set(False)
        self.keep()
        self.assertEqual((run.done, self.door.warnings), ([], []))

    def test_a_core_that_cannot_be_closed_now(self) -> None:
        """A warning lasts as long as the failure; the node tries again. The same for opening."""
        run = self.adopted()
        run.fault = "it hangs"
        self.door.set(True)
        self.assertIn("it hangs", self.door.warnings[-1])
        run.fault = ""
        self.keep()
        self.assertEqual((run.done, self.door.warnings), (["closed"], [self.door.warnings[0]]))
        self.assertIn("UDP, port 443", self.door.warnings[0])
        run.fault = "it hangs"
        self.door.set(False)
        run.fault = ""
        self.keep()
        self.assertEqual((run.done, self.door.warnings), (["closed", "opened"], []))

    def test_a_core_without_close_door(self) -> None:
        run: Any = MemoryGeneration(Clock(), MemoryPlan("", ()), {}, Gate())
        self.generations.adopt(run)
        self.door.set(True)
        self.assertIn("cannot close its inbounds", self.door.warnings[0])
        self.generations.gone(run)
        self.assertEqual(self.door.warnings, [])
