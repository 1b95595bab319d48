"""Quotas and expiry dates are enforced, also if the first try fails."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock, deferLater
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from node.base.errors import CoreFailed
from node.contract.counters import SEPARATOR, Scope
from node.contract.generations import Generations
from node.events.kinds import Kind
from node.limits.connections import Connections
from node.limits.enforcement import AGAIN, TICK, TURN, Enforcement
from node.limits.events import LimitEvents
from node.limits.limits import Defaults
from node.limits.weights import Weights, rules
from node.traffic.readings import Wanted
from node.traffic.sums import Sums
from protos.service_pb2 import Limits, Quota
from tests.harness.limited import new_book
from tests.harness.paced import HERE


class World:
    """An `Enforcement` with fake neighbours."""

    def __init__(self, defaults: Defaults | None = None, weights: Weights | None = None) -> None:
        self.clock = Clock()
        self.off: list[set[str]] = []
        self.fault: Exception | None = None
        self.kept: dict[str, bytes | None] = {}
        self.reports: list[tuple[Kind, object]] = []
        self.reads: list[Wanted] = []
        self.slow = 0.0
        self.interval = self.every = 10.0
        self.book = new_book(lambda: 1e9 + self.clock.seconds(), defaults, weights=weights)
        connections = Connections(Generations(), self.book.in_force)
        # The users may be connected.
        connections.blind = True
        this: Any = self
        self.events = LimitEvents(this, self.clock, self.book.in_force)
        self.enforcement = Enforcement(this.clock, self.book, connections, this, this, this, self.events)

    def stop(self) -> None:
        self.enforcement.stop()
        self.events.close()

    async def in_turn(self) -> None:
        pass

    async def keep_out(self, off: AbstractSet[str]) -> None:
        if self.fault is not None:
            raise self.fault
        self.off.append(set(off))

    async def flush(self) -> None:
        pass

    def save_changed(self) -> None:
        pass

    async def read(self, *, wanted: Wanted) -> None:
        self.reads.append(wanted)
        await deferLater(self.clock, self.slow)

    def limits(self, records: Mapping[str, bytes | None]) -> None:
        self.kept.update(records)

    def tell(self, kind: Kind, text: str, **fields: object) -> None:
        self.reports.append((kind, fields.get("user")))

    def say(self, **given: Limits) -> None:
        packed = {key: limits.SerializeToString(deterministic=True) for key, limits in given.items()}
        self.book.install(packed, packed.keys())


class EnforcementTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.world = World()
        self.world.enforcement.start()
        self.addCleanup(self.world.stop)

    def pass_by(self, seconds: float) -> None:
        self.world.clock.pump([TICK / 2] * int(seconds / (TICK / 2)))

    def test_out_and_in_again(self) -> None:
        """By the clock, without any traffic; events and records match."""
        self.world.say(ann=Limits(expires_at=10**9 + 3), bob=Limits(expires_at=10**9 + 600))
        self.pass_by(2)
        self.assertEqual(self.world.off, [])
        self.pass_by(2)
        self.assertEqual(self.world.off, [{"ann"}])
        self.assertEqual(self.world.reports, [(Kind.LIMIT_CUT, "ann")])
        self.assertEqual(self.world.kept.keys(), {"ann", "bob"})
        self.world.say(ann=Limits(expires_at=10**9 + 600))
        self.pass_by(1)
        self.assertEqual((self.world.off[-1], self.world.reports[-1]), (set(), (Kind.LIMIT_BACK, "ann")))

    def test_failures_are_retried(self) -> None:
        self.world.fault = CoreFailed("it does not answer")
        self.world.say(ann=Limits(expires_at=10**9))
        with capturedLogs() as logged:
            self.pass_by(1)
            [event] = logged
            self.pass_by(AGAIN - 2)
        text = "users could not be barred or let in by their limits; the node tries again: it does not answer"
        self.assertEqual([formatEvent(event)], [text])
        self.assertEqual(logged, [event])
        self.world.fault = None
        self.pass_by(3)
        self.assertEqual(self.world.off, [{"ann"}])
        self.pass_by(2 * AGAIN)
        self.assertEqual((self.world.off, self.world.reports), ([{"ann"}], [(Kind.LIMIT_CUT, "ann")]))

    def test_users_near_their_quota_are_read_soon(self) -> None:
        """Sooner than the regular reading, and not when they are barred."""
        self.world.say(ann=Limits(bytes=Quota(bytes=2**26)))
        self.pass_by(4)
        self.assertTrue(self.world.reads)
        self.world.enforcement.booked({Scope.USER: Sums({}, {"ann": 2**26})})
        self.pass_by(1)
        self.assertEqual(self.world.off, [{"ann"}])
        count = len(self.world.reads)
        self.pass_by(20)
        self.assertEqual(len(self.world.reads), count)

    def test_bytes_by_inbound_weigh(self) -> None:
        """Whether they come with the user's bytes or after them: a user who was barred in between is let in again."""
        world = World(weights=Weights(rules("dear: 4; free: 0")))
        world.enforcement.start()
        self.addCleanup(world.stop)
        world.say(ann=Limits(bytes=Quota(bytes=1000)), bob=Limits(bytes=Quota(bytes=1000)))
        users = Sums({"ann": 240, "bob": 5000}, {"ann": 9})
        world.enforcement.booked({Scope.USER: users, Scope.INBOUND: Sums({"dear": 240})})
        self.assertEqual((world.book.left("ann"), world.book.off), (751, {"bob"}))
        free = {f"bob{SEPARATOR}free": 5000}
        world.enforcement.booked(
            {Scope.USER_INBOUND: Sums({f"ann{SEPARATOR}dear": 240, **free}, {f"ann{SEPARATOR}free": 9})}
        )
        self.assertEqual((world.book.left("ann"), world.book.left("bob"), world.book.off), (40, 1000, set()))
        world.enforcement.booked({Scope.USER: Sums({"bob": 5000}), Scope.USER_INBOUND: Sums(free)})
        self.assertEqual((world.book.left("bob"), world.book.off), (1000, set()))

    def test_the_reactor_gets_turns_between_many_users(self) -> None:
        """All are judged, saved and reported, but not in one turn."""
        names = [f"user{number}" for number in range(5 * TURN)]
        self.world.say(**{name: Limits(expires_at=10**9 + 3) for name in names})
        self.pass_by(1)
        self.world.kept.clear()
        self.pass_by(1.75)
        steps = []

        def other() -> None:
            steps.append(len(self.world.book.off))
            if steps[-1] < len(names):
                self.world.clock.callLater(0, other)

        self.world.clock.callLater(TICK / 2, other)
        self.pass_by(2)
        self.assertEqual(steps[-5:], [TURN, 2 * TURN, 3 * TURN, 4 * TURN, 5 * TURN])
        for found in (self.world.off[-1], self.world.kept):
            self.assertEqual(len(found), len(names))
        self.assertEqual(self.world.book.news, [])

    def test_a_user_with_a_default_quota_is_read_from_their_first_connection(self) -> None:
        """The next regular reading would be too late."""
        world = World(Defaults(Limits(bytes=Quota(bytes=10**7))))
        world.enforcement.start()
        self.addCleanup(world.stop)
        world.book.install({}, {"ann"})
        world.enforcement.arrived("ann", HERE)
        world.enforcement.arrived("somebody else", HERE)
        world.clock.pump([TICK / 2] * 4)
        self.assertTrue(world.reads)
        self.assertIsNone(world.book.count_of("somebody else"))

    def set(self, *names: str, addresses: int) -> None:
        word = Limits(addresses=addresses).SerializeToString(deterministic=True)
        ensureDeferred(self.world.enforcement.override(dict.fromkeys(names, word))).addErrback(self.fail)

    def addresses(self, name: str) -> int:
        return self.world.book.in_force.of(name).addresses

    def test_of_overlapping_overrides_the_last_holds(self) -> None:
        """However long they take to come into force."""
        many = [f"user{number}" for number in range(2 * TURN)]
        self.set(*many, "ann", addresses=1)
        self.pass_by(1)
        self.assertEqual(self.addresses("ann"), 1)
        self.world.slow = 0.3
        self.set("new", "ann", addresses=2)
        self.set("ann", addresses=3)
        self.assertEqual(self.addresses("ann"), 3)
        self.pass_by(2)
        self.assertEqual((self.addresses("ann"), self.addresses("new")), (3, 2))

    def test_a_message_that_comes_before_an_override_is_in_force_holds(self) -> None:
        self.world.say(ann=Limits(addresses=1))
        self.world.slow = 0.3
        self.set("bob", "ann", addresses=2)
        self.world.say(ann=Limits(addresses=3))
        self.pass_by(1)
        self.assertEqual((self.addresses("ann"), self.addresses("bob")), (3, 2))
