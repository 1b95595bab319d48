"""Address limits: enforced over all cores; a check is made only when a new address connects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.base.errors import CoreFailed
from node.base.waiting import Waiters
from node.contract.connections import Address, Arrived, Live
from node.contract.generations import Generations
from node.events.kinds import Kind
from node.events.users import TOGETHER
from node.limits.address_limits import JUST_NOW, LATER, ROOM, SOON, TIDY, AddressLimits
from node.limits.connections import Connections
from node.limits.events import AGAIN, LimitEvents
from node.limits.limits import Limit
from node.limits.options import Grouping
from tests.harness.limited import Given

GRACE = 30.0


def at(number: int) -> Address:
    return bytes((10, 0, number // 256, number % 256))


class Run:
    """A core whose connections the test makes. While `shut`, `look` waits."""

    def __init__(self, clock: Clock) -> None:
        self.arrived: Arrived = lambda key, address: None
        self.unseen: Mapping[str, str] = {}
        self.mixed: Mapping[str, str] = {}
        self.lives: dict[bytes, tuple[Live, float]] = {}
        self.looks: list[set[str]] = []
        self.ended: list[Live] = []
        self.broken = self.stuck = self.shut = False
        self._gate = Waiters()
        self._clock = clock
        self._made = 0

    def connect(self, key: str, address: Address) -> Live:
        """Add a connection, and report it."""
        self._made += 1
        live = Live(key, address, b"%d" % self._made)
        self.lives[live.handle] = live, self._clock.seconds()
        self.arrived(key, address)
        return live

    def move(self, live: Live) -> None:
        """Move a byte on this connection."""
        self.lives[live.handle] = live, self._clock.seconds()

    def close(self, *ending: Live) -> None:
        for live in ending:
            del self.lives[live.handle]

    def open(self) -> None:
        self.shut = False
        self._gate.wake()

    def may_carry(self, key: str) -> bool:
        return any(live.key == key for live, _ in self.lives.values())

    async def look(self, keys: Collection[str]) -> list[Live]:
        self.looks.append(set(keys))
        now = self._clock.seconds()
        seen = [live._replace(silent=now - moved) for live, moved in self.lives.values() if live.key in keys]
        if self.shut:
            await self._gate.wait()
        if self.broken:
            raise CoreFailed("the kernel does not tell")
        return seen

    async def end(self, connections: Iterable[Live]) -> int:
        if self.stuck:
            return 0
        ending = [live.handle for live in connections if live.handle in self.lives]
        self.ended += [self.lives.pop(handle)[0] for handle in ending]
        return len(ending)


class CrowdTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.given = cast(Any, Given())
        self.limits: dict[str, Limit] = self.given.limits
        self.reports: list[tuple[Kind, str, Mapping[str, object]]] = []
        self.run_, self.draining = Run(self.clock), Run(self.clock)
        self.connections = Connections(Generations(), self.given)
        self.connections.runs = [self.run_, self.draining]
        journal: Any = self
        self.events = LimitEvents(journal, self.clock, self.given)
        self.enforcer = AddressLimits(self.clock, self.connections, self.events, Grouping(), GRACE)
        self.run_.arrived = self.draining.arrived = self.enforcer.arrived
        self.enforcer.start()

    def tearDown(self) -> None:
        self.enforcer.stop()
        self.events.close()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def tell(self, kind: Kind, text: str, **fields: object) -> None:
        self.reports.append((kind, text, fields))

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.05] * round(seconds / 0.05))

    def let(self, addresses: int, *keys: str, tells: bool = False) -> None:
        for key in keys:
            self.limits[key] = Limit(addresses=addresses, addresses_tells=tells)

    def connected(self, *runs: Run) -> set[Live]:
        return {live for run in runs or (self.run_,) for live, _ in run.lives.values()}

    @property
    def looks(self) -> int:
        return len(self.run_.looks)

    def test_the_newcomer_is_cut_with_all_its_connections(self) -> None:
        self.let(2, "ann")
        staying = {self.run_.connect("ann", at(number)) for number in (1, 2, 2, 1)}
        staying.add(self.run_.connect("bob", at(3)))
        self.pass_time(1)
        self.assertEqual(self.looks, 0)
        self.run_.connect("ann", at(3))
        self.run_.connect("ann", at(3))
        self.pass_time(2 * SOON)
        self.assertEqual(self.connected(), staying)
        self.assertEqual((self.enforcer.ended, self.looks), (2, 1))
        [(kind, text, fields)] = self.reports
        self.assertIs(kind, Kind.LIMIT_ADDRESSES)
        self.assertIn("'Ann'", text)
        self.assertNotIn("10.0", text)
        self.assertEqual(fields, {"count": 1, "names": "Ann", "reason": "more than 2 at once"})

    def test_a_silent_address_is_cut(self) -> None:
        """A newcomer that keeps trying gets in when the grace is over."""
        self.let(1, "ann")
        self.run_.connect("ann", at(1))
        self.pass_time(GRACE - 5)
        for _ in range(4):
            self.run_.connect("ann", at(2))
            self.pass_time(2 * LATER)
        self.assertEqual({live.address for live in self.connected()}, {at(2)})
        self.assertEqual(self.enforcer.ended, 3)

    def test_a_phone_whose_old_connections_have_ended_gets_in_at_once(self) -> None:
        self.let(1, "ann")
        for number in range(10):
            live = self.run_.connect("ann", at(number))
            self.pass_time(1)
            self.assertEqual(self.connected(), {live})
            self.run_.close(live)
        self.assertEqual(self.enforcer.ended, 0)

    def test_an_address_that_was_cut_comes_again_as_the_newest(self) -> None:
        """However often it comes; that takes one check a second, not one for each try."""
        self.let(1, "ann")
        phone = self.run_.connect("ann", at(1))
        for _ in range(100):
            self.run_.connect("ann", at(2))
            self.run_.move(phone)
            self.pass_time(0.1)
        self.pass_time(2 * LATER)
        self.assertEqual(self.connected(), {phone})
        self.assertLessEqual(self.looks, 12)
        self.assertEqual(len(self.reports), 1)
        # After a while newcomers are checked at once again, and reported.
        self.pass_time(AGAIN + JUST_NOW)
        self.run_.move(phone)
        self.run_.connect("ann", at(2))
        self.pass_time(2 * SOON)
        self.assertEqual(self.connected(), {phone})
        self.assertEqual(len(self.reports), 2)

    def test_many_users_behind_one_address(self) -> None:
        people = [f"user{number}" for number in range(100)]
        self.let(1, *people)
        for key in people * 3:
            self.run_.connect(key, at(1))
        self.pass_time(1)
        self.assertEqual((self.looks, self.enforcer.ended), (0, 0))

    def test_only_their_own_connections_end(self) -> None:
        self.let(1, "ann", "bob")
        bob = self.run_.connect("bob", at(2))
        ann = self.run_.connect("ann", at(1))
        self.run_.connect("ann", at(2))
        self.pass_time(1)
        self.assertEqual(self.connected(), {ann, bob})

    def test_addresses_count_over_all_runs(self) -> None:
        """An address that moves a byte on any core is active."""
        self.let(1, "ann")
        old = self.draining.connect("ann", at(1))
        self.run_.connect("ann", at(2))
        self.pass_time(1)
        self.assertEqual(self.connected(self.run_, self.draining), {old})
        silent = self.run_.connect("ann", at(1))
        self.pass_time(2 * GRACE)
        self.draining.move(old)
        self.run_.connect("ann", at(2))
        self.pass_time(1)
        self.assertEqual(self.connected(self.run_, self.draining), {old, silent})

    def test_a_lower_limit_holds_at_once(self) -> None:
        self.let(3, "ann")
        lives = [self.run_.connect("ann", at(number)) for number in (1, 2, 3)]
        self.let(1, "ann")
        self.enforcer.changed(["ann", "nobody"])
        self.pass_time(2 * SOON)
        self.assertEqual(self.connected(), {lives[0]})
        self.limits.clear()
        self.enforcer.changed(["ann"])
        self.assertEqual(len(self.enforcer._known), 0)

    def test_a_new_limit_holds_for_connected_users(self) -> None:
        for number in range(5):
            self.run_.connect("ann", at(number))
        self.let(2, "ann")
        self.enforcer.changed(["ann"])
        self.pass_time(2 * SOON)
        self.assertEqual(len(self.connected()), 2)

    def test_with_the_action_tell_nothing_ends(self) -> None:
        self.let(1, "ann", tells=True)
        for number in range(5):
            self.run_.connect("ann", at(number))
            self.pass_time(LATER)
        self.assertEqual(len(self.connected()), 5)
        [(_, text, _)] = self.reports
        self.assertIn("stay", text)

    def test_events_are_collected(self) -> None:
        people = [f"user{number}" for number in range(20)]
        self.let(1, *people)
        for number in (1, 2):
            for key in people:
                self.run_.connect(key, at(number))
        self.pass_time(TOGETHER + 1)
        self.assertEqual([fields["count"] for _, _, fields in self.reports], [1, 19])

    def test_an_arrival_during_a_check_is_checked_again(self) -> None:
        """A second connection of an address that is being cut does not slip through."""
        self.let(1, "ann")
        phone = self.run_.connect("ann", at(1))
        self.run_.connect("ann", at(2))
        self.run_.shut = True
        self.pass_time(2 * SOON)
        self.run_.connect("ann", at(2))
        self.run_.open()
        self.pass_time(2 * LATER)
        self.assertEqual(self.connected(), {phone})

    def test_if_a_core_does_not_answer_silent_addresses_stay(self) -> None:
        self.let(1, "ann")
        busy = self.draining.connect("ann", at(1))
        silent = self.run_.connect("ann", at(1))
        self.pass_time(2 * GRACE)
        self.draining.broken = True
        self.run_.connect("ann", at(2))
        self.pass_time(LATER)
        self.assertTrue(any("kernel" in each for each in self.enforcer.warnings))
        self.draining.broken = False
        self.draining.move(busy)
        self.pass_time(2 * LATER)
        self.assertEqual(self.connected(self.run_, self.draining), {busy, silent})
        self.assertEqual(self.enforcer.warnings, [])

    def test_connections_that_could_not_be_ended_are_tried_again(self) -> None:
        self.let(1, "ann")
        phone = self.run_.connect("ann", at(1))
        self.run_.stuck = True
        self.run_.connect("ann", at(2))
        self.pass_time(LATER)
        self.run_.stuck = False
        self.pass_time(2 * LATER)
        self.assertEqual(self.connected(), {phone})
        looks = self.looks
        self.pass_time(5 * LATER)
        self.assertEqual(self.looks, looks)

    def test_disconnected_users_are_forgotten(self) -> None:
        people = [f"user{number}" for number in range(50)]
        self.let(1, *people)
        lives = [self.run_.connect(key, at(1)) for key in people]
        self.run_.connect("without", at(1))
        self.assertEqual(len(self.enforcer._known), 50)
        self.run_.close(*lives[1:])
        self.pass_time(2 * TIDY)
        self.assertEqual(len(self.enforcer._known), 1)

    def test_old_addresses_of_a_traveller_are_forgotten(self) -> None:
        """Under a high limit, with one connection at a time."""
        self.let(1_000_000, "ann")
        for number in range(10 * ROOM):
            live = self.run_.connect("ann", at(number))
            self.pass_time(0.2)
            self.run_.close(live)
        self.assertLessEqual(self.looks, 12)
        known = self.enforcer._known["ann"]
        self.assertLessEqual(len(known.order), ROOM + 1)

    def test_where_users_are_now(self) -> None:
        for number in (2, 1, 2):
            self.run_.connect("ann", at(number))
        self.draining.connect("ann", bytes(range(0x20, 0x30)))
        self.run_.connect("bob", at(1))
        found: Deferred[dict[str, list[str]]] = ensureDeferred(self.enforcer.addresses(["ann", "cy"]))
        expected = {"ann": ["10.0.0.1", "10.0.0.2", "2021:2223:2425:2627::/64"]}
        self.assertEqual(self.successResultOf(found), expected)
        self.draining.broken = True
        found = ensureDeferred(self.enforcer.addresses(["ann"]))
        self.assertEqual(self.successResultOf(found), {"ann": ["10.0.0.1", "10.0.0.2"]})

    def test_notes(self) -> None:
        self.connections.blind = True
        self.assertEqual(self.enforcer.notes("ann"), [])
        self.let(1, "ann")
        self.assertEqual(len(self.enforcer.notes("ann")), 1)
        self.connections.blind = False
        self.draining.unseen = {"a": "why"}
        self.given.tags["ann"] = ("b",)
        self.assertEqual(self.enforcer.notes("ann"), [])
        self.given.tags["ann"] = ("b", "a")
        self.assertEqual(self.enforcer.notes("ann"), ["addresses are not enforced in inbound 'a': why"])
