"""The desired state: the backend that controllers asked for last and its users. Saved as it changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from twisted.internet.defer import Deferred

from node.backend.reconcile import Pairs
from node.backend.record import Recorder
from node.backend.roster import Ahead, Limiter, Roster
from node.backend.supplied import Supplied
from node.base.errors import Unsupported
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.contract.accounts import Account, Accounts, Refusal, key_of
from node.contract.driver import Driver, Plan, Reroutable
from node.contract.routing import Routing
from node.contract.saved import Saved
from node.machine.malloc import Memory
from node.state.store import Store
from protos.service_pb2 import Backend, User

T = TypeVar("T")

# Above this many users a roster is built in the reactor's thread pool.
BUILD_INLINE = 5000

FIXED = "the routing of this core cannot be changed while it runs"

# Driver name, fingerprint of the configuration's meaning, excluded inbounds: equal ones can use the same core.
Fingerprint = tuple[str, str, frozenset[str]]


@dataclass(frozen=True)
class Accepted:
    """An accepted backend: cores are launched from it, as often as needed.

    `request` is the serialised Backend without its users, `keep_alive` its field of that name. `plan` is the prepared
    configuration; `rerouted` is the plan with the routing changes made since.
    """

    request: bytes
    keep_alive: int
    driver: Driver
    plan: Plan
    version: str
    fingerprint: Fingerprint
    rerouted: Reroutable | None = None

    @property
    def runs(self) -> Plan:
        """The plan to launch a core from."""
        return self.rerouted or self.plan

    @property
    def routing(self) -> Routing:
        return self.rerouted.routing if self.rerouted else Routing()

    @property
    def recorded(self) -> tuple[bytes, bytes]:
        """The part in the state file: the request, and the packed routing changes."""
        return self.request, self.routing.pack()

    def means(self, other: Accepted) -> bool:
        """Whether both have the same configuration, even if different executables prepared it."""
        return self.fingerprint == other.fingerprint

    async def read_again(self) -> None:
        """Have the core parse the configuration again. Raises as `Driver.prepare` and `Reroutable.rerouted`."""
        request = Backend.FromString(self.request)
        plan = await self.driver.prepare(request.config, frozenset(request.exclude_inbounds))
        if self.rerouted is not None and isinstance(plan, Reroutable):
            await plan.rerouted(self.routing)

    async def with_routing(self, routing: Routing) -> Accepted:
        """A copy with these routing changes. Raises `Unsupported`, and what `Reroutable.rerouted` raises."""
        if routing == Routing():
            return replace(self, rerouted=None)
        if not isinstance(self.plan, Reroutable):
            raise Unsupported(FIXED)
        return replace(self, rerouted=await self.plan.rerouted(routing))


@dataclass
class Held:
    """The backend that a Start is replacing. It may come back, so changes of users are applied to it, too."""

    accepted: Accepted | None
    roster: Roster


# A roster, and the refused users.
Built = tuple[Roster, list[Refusal]]
# Builds a new roster from one of the same backend. Returns it and the refused users.
Build = Callable[[Accepted | None, Roster], Awaitable[tuple[Roster, list[Refusal]]]]


class Desired:
    """The one wanted backend, if any, and its users."""

    def __init__(self, reactor: PooledReactor, record: Store) -> None:
        self._reactor = reactor
        self.recorder = Recorder(record)
        self._memory = Memory(reactor)
        self._held: Held | None = None
        # The backend built from the saved one, until another is accepted.
        self._ahead: Ahead | None = None
        self.accepted: Accepted | None = None
        self.roster = no_users()
        self.limiter = Limiter()
        # Users whose removal waits for the roster, counted once for each waiting removal.
        self._barred: Counter[str] = Counter()
        # Refusals of users, by the node or a core, since the node began.
        self.refusals = 0

    @property
    def target(self) -> Mapping[str, Accounts]:
        """The accounts that a core should have, by inbound."""
        return self._without(self._barred) if self._barred else self.roster.target

    def is_user(self, name: str) -> bool:
        """Whether there is such a user, in the running backend or in that of a Start under way."""
        key = key_of(name)
        return key in self.roster.users or key in self.serving_roster.users

    def is_barred(self, key: str) -> bool:
        """Whether the user is barred: no core should have them although the roster still does."""
        return key in self._barred

    @contextmanager
    def barring(self, keys: Collection[str]) -> Iterator[None]:
        """Bar users from every core while their removal waits for the roster to be changed."""
        # A copy: the caller may change the collection meanwhile.
        barred = Counter(keys)
        self._barred.update(barred)
        try:
            yield
        finally:
            self._barred -= barred

    def _without(self, keys: Iterable[str]) -> dict[str, Accounts]:
        target = {tag: dict(accounts) for tag, accounts in self.roster.target.items()}
        for accounts in target.values():
            for key in keys:
                accounts.pop(key, None)
        return target

    @property
    def serving_roster(self) -> Roster:
        """The roster of the cores that serve: while a Start tries another backend, that of the backend before."""
        return self._held.roster if self._held and self._held.accepted else self.roster

    @property
    def before(self) -> Accepted | None:
        """The backend accepted before the one that a Start is trying; without such a Start, the accepted one."""
        return self._held.accepted if self._held else self.accepted

    # The backend

    def hold(self, wanted: Accepted, roster: Roster, restorable: bool) -> None:
        """Begin to try another backend; `keep` or `give_up` follows. Not `restorable`: `give_up` leaves no backend."""
        self._held = Held(self.accepted, self.roster) if restorable else Held(None, no_users())
        self.accepted = wanted
        self._install(roster)
        self.recorder.stage(roster)

    def keep(self) -> None:
        """End the trial: the new backend runs."""
        assert self._held is not None and self.accepted is not None
        replaced, self._held = self._held.roster, None
        self.recorder.backend(*self.accepted.recorded, replaced, self.roster)
        # Again: while the core started, much of the Start was still in use.
        self._give_back(replaced)

    def give_up(self) -> None:
        """End the trial: the new backend does not run, and the one before it is wanted again."""
        assert self._held is not None
        held, self._held = self._held, None
        self.accepted = held.accepted
        self._install(held.roster)
        self.recorder.unstage()

    def confirm(self, request: Backend, roster: Roster) -> None:
        """Note that a controller asked again for the running backend, with these users."""
        assert self.accepted is not None
        before = self.roster
        self.accepted = replace(self.accepted, request=without_users(request), keep_alive=request.keep_alive)
        self._install(roster)
        self.recorder.backend(*self.accepted.recorded, before, roster)

    async def revert(self, accepted: Accepted) -> list[Refusal]:
        """Return to an earlier backend with the current users, as far as it has their inbounds.

        Returns the users refused there.
        """
        roster, refused = await self.build(accepted, await self.users())
        before, self.accepted = self.roster, accepted
        self._install(roster)
        self.recorder.backend(*accepted.recorded, before, roster)
        return refused

    def clear(self) -> None:
        """Want no backend."""
        self.accepted = None
        self._install(no_users())

    def reroute(self, accepted: Accepted) -> None:
        """Want the routing of this copy of the running backend."""
        self.accepted = accepted

    def keep_routing(self) -> None:
        """Save the wanted routing, which the core has applied."""
        assert self.accepted is not None
        self.recorder.routing(self.accepted.routing.pack())

    # Users

    async def wanted(self) -> Mapping[str, bytes]:
        """All wanted users, by key, serialised; without a backend, those whom a resume will bring back."""
        left = await self.recorder.left(self._in_pool) if self.accepted is None else {}
        # A backend may have been accepted meanwhile.
        return left if self.accepted is None else self.roster.users

    def change(
        self, users: Sequence[User], change: Callable[[Roster], tuple[Pairs, list[Refusal]]]
    ) -> tuple[Pairs, list[Refusal]]:
        """Apply `change`, which adds, changes or removes these users, to every roster: see `Roster.put`."""
        with self.recorder.following((self._held or self).roster, users):
            if self._held:
                change(self._held.roster)
            touched, refused = change(self.roster)
            for key in {key_of(user.email) for user in users}:
                off = self.limiter.follow(key)
                for roster in self._rosters:
                    touched |= roster.turn(key, off)
            return touched, refused

    def keep_out(self, off: AbstractSet[str]) -> Pairs:
        """Turn off these users and no others, by their limits. Returns the (tag, key) pairs touched."""
        return Pairs().union(*(roster.keep_out(off) for roster in self._rosters))

    @property
    def _rosters(self) -> list[Roster]:
        return [self.roster, self._held.roster] if self._held else [self.roster]

    async def rebuild(self, build: Build, require: Callable[[], None]) -> list[Refusal]:
        """Replace the roster by one that `build` makes of it. Returns the refused users.

        Before each try `require` raises if users cannot be changed now.
        """
        while True:
            require()
            accepted, held = self.accepted, self._held
            roster, refused = await build(accepted, self.roster)
            spare, _ = await build(held.accepted, held.roster) if held else (no_users(), [])
            if accepted is self.accepted and held is self._held:
                break  # else a Start ended meanwhile, and the new roster may not fit the backend
        if held:
            self.recorder.users(held.roster, spare)
            held.roster = spare
        else:
            self.recorder.users(self.roster, roster)
        self._install(roster)
        if held:
            held.roster.keep_out(roster.off)
        return refused

    async def users(self) -> Sequence[User]:
        """The wanted users as messages, in stored order."""
        packed = list(self.roster.users.values())
        return await self._aside(len(packed), _unpacked, packed)

    async def read(self, users: Sequence[User]) -> Supplied:
        """Validate and serialise users, as far as that needs no backend."""
        return await self._aside(len(users), Supplied.of, users)

    async def build_ahead(self, plan: Plan, saved: Sequence[bytes]) -> None:
        """Build the roster of saved users before they are final, for `read_saved`."""
        ahead = Ahead(plan)
        await self._aside(len(saved), ahead.catch_up, saved)
        self.limiter.learn(ahead.roster.limits.values())
        self._ahead = ahead

    async def read_saved(self, saved: Sequence[bytes]) -> Supplied | Ahead:
        """Validate saved users, or bring the roster that was built ahead up to date with them."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return await self._aside(len(saved), _supplied, saved)
        await self._aside(len(saved), ahead.catch_up, saved)
        return ahead

    async def build(
        self, accepted: Accepted | None, users: Sequence[User] | Supplied | Ahead, before: Roster | None = None
    ) -> tuple[Roster, list[Refusal]]:
        """Build the roster of these users. `before` is one of an alike backend; it must not change meanwhile."""
        if accepted is None:
            return no_users(), []
        plan = accepted.plan
        if isinstance(users, Ahead):
            # If users contest a credential, the order of all decides.
            if plan.alike(users.plan) and not users.roster.contested:
                return users.roster, users.refused
            users = await self._aside(len(users.users), _supplied, users.users)
        if len(users.users if isinstance(users, Supplied) else users) <= BUILD_INLINE:
            return Roster.of(users, plan.tags, plan.account, before)
        return await self._in_pool(self._learned, Roster.of, users, plan.tags, plan.account, before)

    async def build_on(
        self, accepted: Accepted | None, users: Sequence[User], roster: Roster
    ) -> tuple[Roster, list[Refusal]]:
        """Build a copy of the roster with these users added, changed or removed. It must not change meanwhile."""
        return (no_users(), []) if accepted is None else await self._in_pool(self._learned, roster.updated, users)

    def _learned(self, build: Callable[..., tuple[Roster, list[Refusal]]], *arguments: object) -> Built:
        """Build a roster and parse the limits of its users; both in the pool thread."""
        roster, refused = build(*arguments)
        self.limiter.learn(roster.limits.values())
        return roster, refused

    # The record

    def loaded(self, saved: Saved) -> bool:
        """Take what an earlier node saved. Returns False if another backend was accepted meanwhile."""
        if not saved.request:
            self._ahead = None
        if self.recorder.untouched:
            self.recorder.loaded(saved)
        return self.recorder.untouched

    def _install(self, roster: Roster) -> None:
        self._ahead = None
        self._give_back(roster)
        self.roster = roster
        roster.keep_out(self.limiter.install(roster.limits, roster.users.keys()))

    def _give_back(self, other: Roster) -> None:
        """Return memory to the system if the roster or this other one is large."""
        if max(len(other.users), len(self.roster.users)) > BUILD_INLINE:
            self._memory.give_back_soon()

    async def _aside(self, size: int, work: Callable[..., T], *arguments: object) -> T:
        """Do `work` on this many users, of large sets in the pool."""
        return await self._in_pool(work, *arguments) if size > BUILD_INLINE else work(*arguments)

    def _in_pool(self, function: Callable[..., T], *arguments: object) -> Deferred[T]:
        return in_pool(self._reactor, function, *arguments)


def _supplied(packed: Iterable[bytes]) -> Supplied:
    return Supplied.of(map(User.FromString, packed))


def _unpacked(packed: Iterable[bytes]) -> list[User]:
    return list(map(User.FromString, packed))


def without_users(request: Backend) -> bytes:
    """Serialise a backend for the state file, without users: they are saved one by one."""
    kept = Backend(type=request.type, config=request.config, keep_alive=request.keep_alive)
    kept.exclude_inbounds.extend(request.exclude_inbounds)
    return kept.SerializeToString()


def no_users() -> Roster:
    """The empty roster, of no backend."""
    return Roster((), _no_account)


def _no_account(_: str, __: User) -> Account | None:
    return None
