"""Address limits behind a reverse proxy: the cores refuse new connections from an address too many."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.base.errors import CoreFailed, Unsupported
from node.contract.connections import Address
from node.contract.generations import Generations
from node.limits import address_limits
from node.limits.address_limits import LATER, SOON, TIDY, AddressLimits
from node.limits.connections import Connections
from node.limits.events import LimitEvents
from node.limits.limits import Limit
from node.limits.options import Grouping
from tests.harness.limited import Given
from tests.node.limits.test_address_limits import GRACE, Run, at


class Fronted(Run):
    """A core whose users come through a reverse proxy; `online` are the addresses that it reports."""

    def __init__(self, clock: Clock, barred: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(clock)
        self.fronted: Mapping[str, str] = {"in": "why"}
        self.barred: Mapping[str, Sequence[str]] = barred or {}
        self.online: dict[str, set[Address]] = {}
        self.out: Mapping[str, Sequence[str]] = {}
        self.told = 0
        self.refuses: Exception | None = None

    def come(self, key: str, address: Address) -> None:
        """A connection through the proxy; one that is refused is over at once."""
        shown = ".".join(map(str, address))
        if shown not in self.out.get(key, ()):
            self.online.setdefault(key, set()).add(address)
        self.arrived(key, address)

    def leave(self, key: str, address: Address) -> None:
        self.online[key].discard(address)

    def may_carry(self, key: str) -> bool:
        return True

    async def forwarded(self, keys: Collection[str]) -> Mapping[str, Collection[Address]]:
        if self.broken:
            raise CoreFailed("it does not answer")
        return {key: set(self.online.get(key, ())) for key in keys}

    async def keep_out(self, barred: Mapping[str, Sequence[str]]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.out, self.told = barred, self.told + 1


class BarredTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.given = cast(Any, Given())
        self.limits: dict[str, Limit] = self.given.limits
        self.front, self.draining = Fronted(self.clock), Fronted(self.clock)
        self.connections = Connections(Generations(), self.given)
        journal: Any = self
        events = LimitEvents(journal, self.clock, self.given)
        self.addCleanup(events.close)
        self.enforcer = AddressLimits(self.clock, self.connections, events, Grouping(), GRACE)
        self.join(self.front, self.draining)
        self.enforcer.start()
        self.addCleanup(self.enforcer.stop)
        self.limits["ann"] = Limit(addresses=1)

    def join(self, *runs: Run) -> None:
        """These cores run from now on, and no others."""
        self.connections.runs = list(runs)
        for run in runs:
            run.arrived = self.enforcer.arrived
        self.enforcer.cores_changed()
        self.pass_time(2 * SOON)

    def tell(self, *_: object, **__: object) -> None:
        pass

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.05] * round(seconds / 0.05))

    def two(self) -> None:
        """A user's second address comes, and is barred."""
        self.front.come("ann", at(1))
        self.pass_time(2 * SOON)
        self.front.come("ann", at(2))
        self.pass_time(2 * SOON)

    def test_the_newcomer_is_barred_in_all_cores(self) -> None:
        """However often it tries, the cores get one list; the other may connect again."""
        self.two()
        self.assertEqual(self.front.out, {"ann": ["10.0.0.2"]})
        self.assertEqual(self.draining.out, self.front.out)
        told = self.front.told
        for _ in range(10):
            self.front.come("ann", at(2))
            self.front.come("ann", at(1))
            self.pass_time(TIDY)
        self.assertEqual((self.front.out, self.front.told), ({"ann": ["10.0.0.2"]}, told))
        found: Deferred[dict[str, list[str]]] = ensureDeferred(self.enforcer.addresses(["ann"]))
        self.assertEqual(self.successResultOf(found), {"ann": ["10.0.0.1"]})

    def test_all_may_come_when_one_is_free(self) -> None:
        self.two()
        self.front.come("ann", at(3))
        self.pass_time(2 * LATER)
        self.assertEqual(self.front.out, {"ann": ["10.0.0.2", "10.0.0.3"]})
        for number in (1, 2, 3):
            self.front.leave("ann", at(number))
        self.pass_time(2 * TIDY)
        self.assertEqual((self.front.out, self.draining.out), ({}, {}))

    def test_the_one_that_is_still_connected_is_first(self) -> None:
        """The live connections of a barred address go on, and count when another address is free."""
        self.two()
        self.front.come("ann", at(3))
        self.pass_time(2 * LATER)
        self.front.leave("ann", at(1))
        self.front.leave("ann", at(2))
        self.pass_time(2 * TIDY)
        self.assertEqual(self.front.out, {"ann": ["10.0.0.2"]})

    def test_very_many_addresses(self) -> None:
        """The last ones are barred, and before those the ones that are still connected; the rules rest then."""
        self.patch(address_limits, "MOST_BARRED", 3)
        for number in range(1, 7):
            self.front.come("ann", at(number))
            self.pass_time(2 * LATER)
            if number > 2:
                self.front.leave("ann", at(number))
        self.pass_time(2 * TIDY)
        self.assertEqual(self.front.out, {"ann": ["10.0.0.2", "10.0.0.5", "10.0.0.6"]})
        told = self.front.told
        self.pass_time(10 * TIDY)
        self.assertEqual(self.front.told, told)

    def test_another_limit(self) -> None:
        for limit in (Limit(addresses=2), Limit(), Limit(addresses=1, addresses_tells=True)):
            self.limits["ann"] = Limit(addresses=1)
            self.two()
            self.assertEqual(self.front.out, {"ann": ["10.0.0.2"]})
            self.limits["ann"] = limit
            self.enforcer.changed(["ann"])
            self.pass_time(2 * LATER)
            self.assertEqual(self.front.out, {})
            self.front.leave("ann", at(2))
            self.pass_time(2 * TIDY)

    def test_own_sockets_of_a_barred_address_are_closed(self) -> None:
        self.two()
        self.front.connect("ann", at(2))
        self.front.connect("ann", at(1))
        self.pass_time(2 * TIDY)
        self.assertEqual({live.address for live, _ in self.front.lives.values()}, {at(1)})

    def test_a_new_core_is_told(self) -> None:
        self.two()
        new = Fronted(self.clock)
        self.join(new, self.front)
        self.assertEqual(new.out, {"ann": ["10.0.0.2"]})

    def test_a_new_core_that_keeps_out_who_may_come_by_now(self) -> None:
        new = Fronted(self.clock, {"ann": ["10.0.0.2"]})
        new.out = new.barred
        self.join(new)
        self.pass_time(2 * LATER)
        self.assertEqual((new.out, new.told), ({}, 1))

    def test_the_next_node_goes_on(self) -> None:
        """It takes over who is out from the cores, as networks of any size."""
        left = Fronted(self.clock, {"ann": ["10.0.0.2", "2001:db8::/48"]})
        left.online["ann"] = {at(1)}
        self.join(left)
        self.assertEqual(left.out, {"ann": ["10.0.0.2", "2001:db8::/64"]})

    def test_a_core_that_does_not_answer(self) -> None:
        """The node warns, tries again, and lets no address in meanwhile."""
        self.front.refuses = CoreFailed("it hangs")
        self.two()
        self.assertEqual(len(self.enforcer.warnings), 1)
        self.front.refuses = Unsupported("it cannot")
        self.pass_time(2 * LATER)
        self.assertEqual(len(self.enforcer.warnings), 1)
        self.front.refuses = None
        self.pass_time(2 * LATER)
        self.assertEqual(self.front.out, {"ann": ["10.0.0.2"]})
        self.front.broken = True
        self.front.leave("ann", at(1))
        self.pass_time(2 * TIDY)
        self.assertEqual(self.front.out, {"ann": ["10.0.0.2"]})

    def test_notes(self) -> None:
        self.given.tags["ann"] = ("in",)
        self.front.unseen = {"in": "unknown"}
        self.assertEqual(self.enforcer.notes("ann"), ["addresses in inbound 'in': why"])
