"""Connections that a controller ends, and the list of users online: over all runs, and what is unsupported."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock

from drivers.pretended.scripted import Gate, MemoryDriver, MemoryPlan, SharedGeneration, SharingDriver
from node.base.errors import CoreFailed, InvalidRequest, NotInitialized, UnknownName, Unsupported
from node.contract.accounts import Accounts
from node.contract.connections import Address, Arrived, Live
from node.engine import connected
from node.engine.connected import BLIND, FRONTED, LAG, NO_LIST, TURN
from protos import service_pb2 as pb
from protos.service_pb2 import DropConnectionsRequest, ListOnlineRequest, StatRequest
from tests.harness.memory import person
from tests.node.api.test_listing import ALL, ListingCase

ANN, BOB, CY = person("Ann", "one", "a"), person("bob", "two", "a", "b"), person("cy", "three", "b")
HERE, THERE = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])


class SeeingGeneration(SharedGeneration):
    """A core with connections: of each the user, the address and the inbound. `ends`: those it has ended."""

    def __init__(self, clock: Clock, plan: MemoryPlan, accounts: Mapping[str, Accounts], stopping: Gate) -> None:
        super().__init__(clock, plan, accounts, stopping)
        self.arrived: Arrived = lambda _, __: None
        self.unseen: dict[str, str] = {}
        self.mixed: dict[str, str] = {}
        self.unlisted: dict[str, str] = {}
        self.live: list[Live] = []
        self.ended: list[Live] = []
        self.sizes: list[int] = []
        self.places: dict[str, dict[str, int]] = {}
        self.reported: dict[str, set[Address]] | None = {}
        self.fronted: dict[str, str] = {}
        self.barred: dict[str, Sequence[str]] = {}

    async def keep_out(self, barred: Mapping[str, Sequence[str]]) -> None:
        await self._answered()

    async def forwarded(self, keys: Collection[str]) -> Mapping[str, Collection[Address]]:
        await self._answered()
        if self.reported is None:
            raise Unsupported("an old core")
        return {key: some for key, some in self.reported.items() if key in keys}

    def connect(self, key: str, address: Address, tag: str) -> Live:
        live = Live(key, address, b"%d" % len(self.live), tag=tag)
        self.live.append(live)
        return live

    def may_carry(self, key: str) -> bool:
        return any(live.key == key for live in self.live)

    async def look(self, keys: Collection[str]) -> list[Live]:
        self.sizes.append(len(keys))
        await self._answered()
        return [live for live in self.live if live.key in keys]

    async def end(self, connections: Iterable[Live]) -> int:
        ending = {*connections}
        self.ended += [live for live in self.live if live in ending]
        self.live = [live for live in self.live if live not in ending]
        return len(ending)

    async def online(self, key: str) -> Mapping[str, int]:
        await self._answered()
        return self.places.get(key, {})

    async def online_keys(self) -> Collection[str]:
        await self._answered()
        return self.places


class SeeingDriver(SharingDriver):
    kind = SeeingGeneration


class ConnectedCase(ListingCase):
    kind: type[MemoryDriver] = SeeingDriver

    def core(self, config: str, *users: pb.User) -> SeeingGeneration:
        return cast(SeeingGeneration, self.started(config, *users))

    def drop(self, name: str = "", address: str = "", inbound: str = "") -> Deferred[pb.DropConnectionsResponse]:
        request = DropConnectionsRequest(name=name, address=address, inbound=inbound)
        return ensureDeferred(self.backend.drop_connections(request, ALL))

    def dropped(self, **asked: str) -> tuple[int, int, dict[str, str]]:
        reply = self.successResultOf(self.passed(self.drop(**asked)))
        return reply.ended, reply.users, dict(reply.unsupported)

    def online(self, after: str = "", limit: int = 0) -> Deferred[pb.ListOnlineResponse]:
        return ensureDeferred(self.backend.list_online(ListOnlineRequest(after=after, limit=limit), ALL))

    def listed(self, after: str = "", limit: int = 0) -> tuple[dict[str, dict[str, int]], str, int]:
        page = self.successResultOf(self.passed(self.online(after, limit)))
        return {user.name: dict(user.ips) for user in page.users}, page.next, page.total

    def passed(self, work: Deferred[Any]) -> Deferred[Any]:
        self.clock.pump([LAG] + [0] * 100)
        return work

    def events(self) -> list[pb.Event]:
        found = (pb.Event.FromString(packed.body) for packed in self.backend.journal.read(0))
        return [event for event in found if event.kind == "users.dropped"]


class Dropping(ConnectedCase):
    def test_what_is_given_must_all_apply(self) -> None:
        """By user, address and inbound: only these connections end."""
        core = self.core("a,b", ANN, BOB, CY)
        ann = core.connect("ann", HERE, "a")
        bob = [core.connect("bob", address, tag) for address in (HERE, THERE) for tag in "ab"]
        cy = core.connect("cy", THERE, "b")
        self.assertEqual(self.dropped(name="BOB", address="10.0.0.2", inbound="b"), (1, 1, {}))
        self.assertEqual(core.ended, [bob[3]])
        core.ended.clear()
        self.assertEqual(self.dropped(address="::ffff:10.0.0.2"), (2, 2, {}))
        self.assertCountEqual(core.ended, [bob[2], cy])
        core.ended.clear()
        self.assertEqual(self.dropped(inbound="b"), (1, 1, {}))
        self.assertEqual(core.ended, [bob[1]])
        core.ended.clear()
        self.assertEqual(self.dropped(name="ann"), (1, 1, {}))
        self.assertEqual((core.ended, core.live), ([ann], [bob[0]]))
        self.assertEqual(self.dropped(name="ann"), (0, 0, {}))
        self.assertEqual(self.dropped(address="fe80::1"), (0, 0, {}))
        self.assertEqual(
            [(dict(event.fields)["by"], dict(event.fields)["names"]) for event in self.events()],
            [("user, address, inbound", "bob"), ("address", "bob, cy"), ("inbound", "bob"), ("user", "Ann")],
        )

    def test_one_that_the_core_reports_late(self) -> None:
        """A core reports a connection some time after it began: this one ends, too."""
        core = self.core("a,b", ANN)
        dropped = self.drop(name="ann")
        core.connect("ann", HERE, "a")
        self.assertEqual(self.successResultOf(self.passed(dropped)).ended, 1)

    def test_on_all_runs(self) -> None:
        """A draining run has connections, too, and one of another configuration its own inbounds."""
        old = self.core("a,c", ANN, person("bob", "two", "c"))
        old.connect("ann", HERE, "a")
        old.connect("bob", HERE, "c")
        new = self.core("a,b", ANN, BOB)
        new.connect("ann", THERE, "a")
        self.assertEqual(self.dropped(name="ann"), (2, 1, {}))
        self.assertEqual(self.dropped(inbound="c"), (1, 1, {}))
        self.assertEqual((old.live, new.live), ([], []))

    def test_the_event_has_users_and_no_address(self) -> None:
        core = self.core("a,b", ANN, BOB)
        for address in (HERE, THERE):
            core.connect("ann", address, "a")
        core.connect("bob", HERE, "a")
        self.assertEqual(self.dropped(inbound="a"), (3, 2, {}))
        (event,) = self.events()
        self.assertEqual(event.text, "a controller had connections of 'Ann', 'bob' ended: 3")
        self.assertEqual(dict(event.fields), {"connections": "3", "count": "2", "names": "Ann, bob", "by": "inbound"})

    def test_what_cannot_be_ended(self) -> None:
        """The reply has the inbounds that are concerned, and no others; what the core sees ends all the same."""
        core = self.core("a,b", ANN, BOB, CY)
        core.unseen = {"b": "it is over UDP"}
        core.connect("bob", HERE, "a")
        said = {"b": "it is over UDP"}
        self.assertEqual(self.dropped(name="ann"), (0, 0, {}))
        self.assertEqual(self.dropped(inbound="a", name="bob"), (1, 1, {}))
        for asked in ({"name": "bob"}, {"address": "10.0.0.1"}, {"inbound": "b"}):
            self.assertEqual(self.dropped(**asked), (0, 0, said))

    def test_through_a_reverse_proxy(self) -> None:
        """The inbound is named if such a connection goes on, and for a core that cannot tell."""
        core = self.core("a,b", ANN, BOB, CY)
        core.fronted = {"b": "a note"}
        core.connect("bob", HERE, "b")
        self.assertEqual(self.dropped(name="bob"), (1, 1, {}))
        core.reported = {"bob": {THERE}}
        for asked in ({"name": "bob"}, {"address": "10.0.0.2"}, {"inbound": "b"}):
            self.assertEqual(self.dropped(**asked), (0, 0, {"b": FRONTED}))
        for asked in ({"name": "ann"}, {"name": "cy"}, {"address": "10.0.0.1"}, {"inbound": "a"}):
            self.assertEqual(self.dropped(**asked), (0, 0, {}))
        core.reported = None
        self.assertEqual(self.dropped(name="cy"), (0, 0, {"b": FRONTED}))

    def test_of_several_users(self) -> None:
        """A connection that is no user's goes on; others to the same inbound end."""
        core = self.core("a,b", ANN, BOB, CY)
        core.mixed = {"b": "it carries several users"}
        core.connect("bob", HERE, "b")
        self.assertEqual(self.dropped(name="ann"), (0, 0, {}))
        self.assertEqual(self.dropped(name="bob"), (1, 1, core.mixed))

    def test_many_users_in_parts(self) -> None:
        """A large inbound is looked at in parts, and only for users who may be connected."""
        core = self.core("a,b", *(person(f"user{number}", f"{number}", "a") for number in range(2 * TURN + 1)))
        for number in range(0, 2 * TURN, 2):
            core.connect(f"user{number}", HERE, "a")
        self.assertEqual(self.dropped(inbound="a"), (TURN, TURN, {}))
        self.assertEqual(sum(core.sizes), TURN)
        self.assertLessEqual(max(core.sizes), TURN)

    def test_refused(self) -> None:
        core = self.core("a,b", ANN)
        core.connect("ann", HERE, "a")
        for asked in ({"name": "nobody"}, {"inbound": "c"}, {"name": "ann", "inbound": "c"}):
            self.failureResultOf(self.drop(**asked), UnknownName)
        for asked in ({}, {"address": "10.0.0.1/8"}, {"address": "ann"}, {"name": "ann", "address": " "}):
            self.failureResultOf(self.drop(**asked), InvalidRequest)
        self.assertEqual((len(core.live), self.events()), (1, []))

    def test_a_core_that_fails(self) -> None:
        """The error is reported, and so is what another core has ended before."""
        old = self.core("a,b", ANN)
        old.connect("ann", HERE, "a")
        new = self.core("a,b x", ANN)
        new.connect("ann", THERE, "a")
        old.silent = True
        failed = self.drop(name="ann")
        self.clock.pump([1] * 10)
        self.failureResultOf(failed, CoreFailed)
        self.assertEqual((len(old.live), new.live, len(self.events())), (1, [], 1))

    def test_without_a_core(self) -> None:
        for work in (self.drop(name="ann"), self.online()):
            self.failureResultOf(work, NotInitialized)


class Blind(ConnectedCase):
    """A core that reports no connections."""

    kind = SharingDriver

    def test_it_is_unsupported(self) -> None:
        """Neither is answered with nothing, as if no user were connected."""
        self.started("a,b", ANN)
        self.assertEqual(self.failureResultOf(self.drop(name="ann"), Unsupported).value.text, BLIND)
        self.assertEqual(self.failureResultOf(self.online(), Unsupported).value.text, NO_LIST)

    def test_beside_one_that_does(self) -> None:
        """The reply names its inbounds; a list would lack its users."""
        self.started("a,b", ANN)
        self.driver.kind = SeeingGeneration
        new = self.core("a,b x", ANN)
        new.connect("ann", HERE, "a")
        self.assertEqual(self.dropped(name="ann"), (1, 1, {"a": BLIND}))
        self.failureResultOf(self.online(), Unsupported)


class Online(ConnectedCase):
    def test_pages(self) -> None:
        """By name, each once, with the addresses on all runs; users of the configuration are not listed."""
        old = self.core("a,b", ANN, BOB, CY)
        old.places = {"bob": {"10.0.0.1": 5, "10.0.0.2": 3}, "cy": {"10.0.0.1": 1}, "config's own": {"10.0.0.9": 1}}
        new = self.core("a,b x", ANN, BOB, CY)
        new.places = {"bob": {"10.0.0.2": 7}, "ann": {"10.0.0.3": 2}}
        ann, cy = {"Ann": {"10.0.0.3": 2}}, {"cy": {"10.0.0.1": 1}}
        bob = {"bob": {"10.0.0.1": 5, "10.0.0.2": 7}}
        self.assertEqual(self.listed(), (ann | bob | cy, "", 3))
        self.assertEqual(self.listed(limit=3), (ann | bob | cy, "", 3))
        self.assertEqual(self.listed(limit=2), (ann | bob, "bob", 3))
        self.assertEqual(self.listed("BOB", 2), (cy, "", 3))
        self.assertEqual(self.listed("cy"), ({}, "", 3))

    def test_who_leaves_meanwhile(self) -> None:
        """A user who has gone has no row, and the next page begins after them."""
        core = self.core("a,b", ANN, BOB, CY)
        core.places = {"ann": {}, "bob": {"10.0.0.1": 1}}
        self.assertEqual(self.listed(limit=1), ({}, "ann", 2))
        self.assertEqual(self.listed("ann", limit=1), ({"bob": {"10.0.0.1": 1}}, "", 2))

    def test_large_rows(self) -> None:
        """A page ends before it is too large, and has at least one row."""
        self.patch(connected, "MOST_BYTES", 100)
        core = self.core("a,b", ANN, BOB, CY)
        many = {f"10.0.0.{number}": number for number in range(20)}
        core.places = {"ann": many, "bob": many, "cy": {"10.0.0.1": 1}}
        self.assertEqual(self.listed(), ({"Ann": many}, "ann", 3))
        self.assertEqual(self.listed("ann"), ({"bob": many}, "bob", 3))
        self.assertEqual(self.listed("bob"), ({"cy": {"10.0.0.1": 1}}, "", 3))

    def test_many(self) -> None:
        """The first ones of very many are sorted in a thread."""
        people = [person(f"user{number:05}", f"{number}", "a") for number in range(6000)]
        core = self.core("a,b", *people)
        core.places = {user.email: {"10.0.0.1": 1} for user in people}
        rows, after, total = self.listed()
        self.assertEqual(([*rows], after, total), ([user.email for user in people[:1000]], "user00999", 6000))

    def test_what_is_not_listed(self) -> None:
        """The reply has the inbounds whose users the core does not report."""
        core = self.core("a,b", ANN)
        core.unlisted = {"b": "it leads elsewhere"}
        page = self.successResultOf(self.passed(self.online()))
        self.assertEqual((dict(page.unsupported), page.total), ({"b": "it leads elsewhere"}, 0))

    def test_a_user_of_what_is_not_listed(self) -> None:
        """They are unsupported, and not offline, unless they are online elsewhere; others are offline."""
        core = self.core("a,b", ANN, BOB)
        core.unlisted = {"b": "it leads elsewhere"}

        def asked(name: str) -> Deferred[Any]:
            return self.passed(ensureDeferred(self.backend.online(StatRequest(name=name), ALL)))

        self.assertEqual(self.successResultOf(asked("ann")).value, 0)
        self.assertIn("it leads elsewhere", self.failureResultOf(asked("bob"), Unsupported).value.text)
        core.places = {"bob": {"10.0.0.1": 1}}
        self.assertEqual(self.successResultOf(asked("bob")).value, 1)

    def test_addresses_that_a_reverse_proxy_reported(self) -> None:
        """They are marked, for the users of the page, over all runs."""
        old = self.core("a,b", ANN, BOB, CY)
        old.places = {"bob": {"10.0.0.1": 5, "10.0.0.2": 3}}
        old.reported = {"bob": {HERE, bytes([10, 0, 0, 9])}}
        new = self.core("a,b x", ANN, BOB, CY)
        new.places = {"ann": {"2001:db8::1": 1}, "cy": {"10.0.0.1": 1}}
        new.reported = {"ann": {bytes.fromhex("20010db8") + bytes(11) + b"\1"}}
        page = self.successResultOf(self.passed(self.online()))
        marked = {row.name: list(row.forwarded) for row in page.users if row.forwarded}
        self.assertEqual(marked, {"Ann": ["2001:db8::1"], "bob": ["10.0.0.1"]})
        one = self.passed(ensureDeferred(self.backend.online_ips(StatRequest(name="bob"), ALL)))
        self.assertEqual(list(self.successResultOf(one).forwarded), ["10.0.0.1"])

    def test_odd_texts_for_addresses(self) -> None:
        """A client chooses the zone of a forwarded address; that costs others nothing."""
        core = self.core("a,b", ANN, BOB)
        core.places = {"ann": {"fe80::1%a%b": 1}, "bob": {"10.0.0.1": 1, "": 1, "x": 1}}
        core.reported = {"ann": {bytes.fromhex("fe80") + bytes(13) + b"\1"}, "bob": {HERE}}
        page = self.successResultOf(self.passed(self.online()))
        self.assertEqual([row.name for row in page.users], ["Ann", "bob"])
        marked = {row.name: list(row.forwarded) for row in page.users if row.forwarded}
        self.assertEqual(marked, {"Ann": ["fe80::1%a%b"], "bob": ["10.0.0.1"]})

    def test_one_user(self) -> None:
        """The number and the addresses of one user are those of the list."""
        core = self.core("a,b", ANN)
        core.places = {"ann": {"10.0.0.1": 1, "10.0.0.2": 2}}
        request = StatRequest(name="ANN")
        self.assertEqual(self.successResultOf(ensureDeferred(self.backend.online(request, ALL))).value, 2)
        self.assertEqual(
            dict(self.successResultOf(ensureDeferred(self.backend.online_ips(request, ALL))).ips), core.places["ann"]
        )
