"""NODE_QUOTA: counted, reported, saved, and the inbounds closed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.contract.generations import Generations
from node.contract.saved import Saved
from node.events.kinds import Kind
from node.limits.allowance import Allowance
from node.limits.node_quota import NodeQuotaLimit
from node.limits.periods import zone
from node.machine.interfaces import Carried, Interfaces, of_machine, read_interfaces
from protos.service_pb2 import BaseInfoResponse, NodeQuota
from tests.harness.whole import everything
from tests.node.limits.test_inbound_gate import Closable

BEGAN = datetime(2026, 5, 31, 23, 0, tzinfo=UTC).timestamp()


class OwnLimitTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock: Any = Clock()
        self.carried = {"eth0": Carried(100, 100), "br0": Carried(5, 5), "lo": Carried(9, 9)}
        self.devices = frozenset({"eth0"})
        self.kept: dict[str, bytes] = {}
        self.writes = 0
        self.reports: list[tuple[Kind, dict[str, object]]] = []
        self.generations = Generations()
        self.core: Any = Closable()
        self.generations.adopt(self.core)

    def node(self, allowance: Allowance) -> NodeQuotaLimit:
        """Start a node, with the record of the one before."""
        own = NodeQuotaLimit(
            *(self.clock, allowance, self.generations, self, self, 10),  # type: ignore[arg-type]
            lambda: (BEGAN + self.clock.seconds(), Interfaces("boot", dict(self.carried), self.devices)),
        )
        own.restore(Saved(limits=(*self.kept.items(),)))
        own.start()
        self.addCleanup(own.stop)
        return own

    def limits(self, records: dict[str, bytes]) -> None:
        """Save, as the store does."""
        self.kept.update(records)
        self.writes += 1

    def tell(self, kind: Kind, _: str, **fields: object) -> None:
        """Report, as the journal does."""
        self.reports.append((kind, fields))

    def carry(self, count: int, name: str = "eth0") -> None:
        """Carry bytes, and let the node read them."""
        before = self.carried[name]
        self.carried[name] = Carried(before.received + count, before.sent)
        self.clock.advance(1)

    def quota(self, own: NodeQuotaLimit) -> NodeQuota:
        """The usage that `info` has."""
        info = BaseInfoResponse()
        own.summary(info)
        self.assertTrue(info.limits.HasField("node"))
        return info.limits.node

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind, _ in self.reports]

    def test_without_a_quota(self) -> None:
        """Nothing is read, reported or written."""
        own = self.node(Allowance())
        self.carry(10**9)
        info = BaseInfoResponse()
        own.summary(info)
        self.assertEqual((info, own.warnings, self.reports, self.writes), (BaseInfoResponse(), [], [], 0))
        self.assertEqual((self.clock.getDelayedCalls(), everything(own).limits), ([], {}))

    def test_a_smaller_quota_in_another_month(self) -> None:
        """For a month that is over nothing is reported, and no inbound closed."""
        own = self.node(Allowance(1000))
        self.carry(700)
        own.stop()
        self.clock.advance(7200)
        own = self.node(Allowance(500, closes=True))
        self.assertEqual(self.kinds, [Kind.NODE_QUOTA_BEGUN])
        self.assertEqual((self.core.done, own.warnings), ([], []))

    def test_near_over_and_the_next_period(self) -> None:
        own = self.node(Allowance(1000, closes=True))
        self.carry(799)
        self.assertEqual((self.kinds, own.warnings), ([], []))
        self.carry(1)
        self.carry(200)
        self.assertEqual(self.kinds, [Kind.NODE_QUOTA_NEAR, Kind.NODE_QUOTA_OVER])
        self.assertEqual(
            self.reports[-1][1], {"bytes": 1000, "used": 1000, "resets_at": int(BEGAN) + 3600, "closed": True}
        )
        self.assertEqual((self.quota(own).used, self.quota(own).closed), (1000, True))
        self.assertIn("takes no new connections", own.warnings[0])
        self.assertEqual(self.core.done[-1], "closed")
        self.clock.advance(3600)
        self.assertEqual(self.kinds[2:], [Kind.NODE_QUOTA_BEGUN])
        self.assertEqual((self.quota(own).used, self.quota(own).closed, own.warnings), (0, False, []))
        self.assertEqual(self.core.done[-1], "opened")

    def test_the_time_zone(self) -> None:
        """A month begins at midnight there: in Berlin an hour before BEGAN."""
        own = self.node(Allowance(1000, zone=zone("Europe/Berlin")))
        self.carry(700)
        self.assertEqual(self.quota(own).resets_at, int(BEGAN) - 3600 + 30 * 86_400)
        self.clock.advance(3600)
        self.assertEqual((self.quota(own).used, self.kinds), (700, []))

    def test_action_warn(self) -> None:
        own = self.node(Allowance(1000))
        self.carry(1001)
        self.assertEqual((self.kinds, self.core.done), ([Kind.NODE_QUOTA_OVER], []))
        self.assertEqual(len(own.warnings), 1)

    def test_across_restarts(self) -> None:
        """Closed before the first tick; what moved meanwhile counts; with more it is open, and over again later."""
        own = self.node(Allowance(1000, closes=True))
        self.carry(900)
        own.stop()
        self.carry(200)
        self.core = Closable()
        self.generations.adopt(self.core)
        own = self.node(Allowance(1000, closes=True))
        self.assertEqual((self.quota(own).used, self.core.done[0]), (1100, "closed"))
        own.stop()
        raised = self.node(Allowance(2000, closes=True))
        self.carry(900)
        self.assertEqual((self.quota(raised).used, self.quota(raised).closed), (2000, True))

    def test_a_crash_forgets_nothing(self) -> None:
        """The kernel knows what moved since the last record, which is written every ten seconds."""
        own = self.node(Allowance(10**6))
        for _ in range(25):
            self.carry(7)
        self.assertEqual(self.writes, 3)
        again = self.node(Allowance(10**6))
        self.assertEqual((self.quota(own).used, self.quota(again).used), (175, 175))

    def test_which_interfaces_count(self) -> None:
        """Hardware; without any, all but loopback; or those that are named, even if one is missing."""
        self.assertEqual(of_machine(Interfaces("", self.carried, self.devices)), {"eth0"})
        self.assertEqual(of_machine(Interfaces("", self.carried, frozenset())), {"eth0", "br0"})
        own = self.node(Allowance(1000, interfaces=("lo", "wan")))
        self.carry(30, "eth0")
        self.carry(20, "lo")
        self.assertEqual(self.quota(own).used, 20)
        self.assertEqual(own.warnings, ["NODE_QUOTA_INTERFACE: there is no interface wan"])

    def test_the_real_counters(self) -> None:
        """The kernel has loopback, which is not hardware, and a boot id."""
        found = read_interfaces()
        self.assertIn("lo", found.carried)
        self.assertNotIn("lo", of_machine(found))
        self.assertEqual(len(found.boot), 36)
