"""Which cores report new connections, and whom that concerns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import Gate, MemoryGeneration, MemoryPlan
from node.contract.connections import Address
from node.contract.generations import Generations
from node.limits.connections import Connections, Watcher, look
from tests.harness.limited import Given
from tests.harness.paced import HERE, PacedGeneration


class Noting(Watcher):
    """Notes each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def arrived(self, key: str, address: Address) -> None:
        self.calls.append((key, address))

    def changed(self, keys: Collection[str]) -> None:
        self.calls.append(("changed", [*keys]))

    def cores_changed(self) -> None:
        self.calls.append(("cores", None))


class ConnectionsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.given = cast(Any, Given())
        self.generations = Generations()
        self.connections = Connections(self.generations, self.given)
        self.watchers = [Noting(), Noting()]
        for watcher in self.watchers:
            self.connections.watch(watcher)

    def adopted(self, *keys: str) -> PacedGeneration:
        run = PacedGeneration(Clock(), *keys)
        self.generations.adopt(run)
        return run

    def calls(self) -> list[tuple[str, object]]:
        """The calls of both watchers since the last look."""
        one, other = (watcher.calls for watcher in self.watchers)
        self.assertEqual(one, other)
        for watcher in self.watchers:
            watcher.calls = []
        return one

    def test_cores_report_connections_once_any_user_has_limits(self) -> None:
        """The cores that serve then, and those that come later."""
        run = self.adopted("anna")
        run.connect("anna", b"1")
        self.connections.changed(["anna"])
        run.connect("anna", b"2")
        self.assertEqual(self.calls(), [("cores", None), ("changed", ["anna"])])
        self.given.any = True
        self.connections.changed(["anna"])
        run.connect("anna", b"3")
        self.adopted("bert").connect("bert", b"1")
        run.connect("anna", b"4")
        arrived = ("anna", HERE)
        self.assertEqual(self.calls(), [("changed", ["anna"]), arrived, ("cores", None), ("bert", HERE), arrived])

    def test_a_core_that_attributes_no_connections(self) -> None:
        run = self.adopted("anna")
        self.assertFalse(self.connections.blind)
        other = MemoryGeneration(Clock(), MemoryPlan("", ("a",)), {"a": {"anna": b""}}, Gate())
        self.generations.adopt(other)
        self.assertTrue(self.connections.blind)
        self.assertEqual(([*self.connections.runs], [*self.connections.paced]), ([run], [run]))
        self.assertIs(self.connections.current, other)
        self.generations.gone(other)
        self.assertFalse(self.connections.blind)

    def test_each_core_is_asked_for_the_users_whom_it_may_carry(self) -> None:
        """A core that does not answer does not keep the others from it."""
        idle, broken, run = self.adopted("anna"), self.adopted("anna"), self.adopted("anna", "bert")
        for each in (broken, run):
            each.connect("anna", b"1")
        broken.blind = True
        self.assertTrue(self.connections.may_carry("anna"))
        self.assertFalse(self.connections.may_carry("bert"))
        found, faults = self.successResultOf(ensureDeferred(look(self.connections.paced, ["anna", "bert"])))
        self.assertEqual(found, [(run, [run.flows[b"1"]]), (idle, [])])
        self.assertEqual([fault.text for fault in faults], ["the kernel does not list connections"])
        self.assertEqual((idle.looks, broken.looks, run.looks), ([], [{"anna"}], [{"anna"}]))
