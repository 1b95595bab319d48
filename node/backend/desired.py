"""What controllers asked for last: the backend, and who may use it. Recorded as it changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

from node.backend.reconcile import Pairs
from node.backend.record import Record, Recorder
from node.backend.roster import Roster
from node.backend.supplied import Supplied
from node.contract.accounts import Account, Accounts, Refusal, key_of
from node.contract.driver import Driver, Plan, Reroutable
from node.contract.routing import Routing
from node.errors import Unsupported
from node.machine.malloc import Memory
from node.reactor import PooledReactor
from node.state.database import Changes, Saved
from protos.service_pb2 import Backend, User

T = TypeVar("T")

# Above this many users a roster is built in the reactor's pool.
BUILD_INLINE = 5000

FIXED = "the routing of this core cannot be changed while it runs"

# A driver's name, a configuration by its meaning, the excluded inbounds: equal ones need no other core.
Fingerprint = tuple[str, str, frozenset[str]]


@dataclass(frozen=True)
class Accepted:
    """A backend that was asked for and accepted: what a core is run from, again and again if need be.

    `request` is the serialised Backend without its users, `keep_alive` what that says of it. `plan` is its
    configuration as it was prepared; `rerouted` the same with what was changed of its routing since.
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
        """What a core is launched from."""
        return self.rerouted or self.plan

    @property
    def routing(self) -> Routing:
        return self.rerouted.routing if self.rerouted else Routing()

    @property
    def recorded(self) -> tuple[bytes, bytes]:
        """What outlives the node: the request, and what was changed of its routing."""
        return self.request, self.routing.pack()

    def means(self, other: Accepted) -> bool:
        """Whether both are of the same configuration, which may have been prepared by different executables."""
        return self.fingerprint == other.fingerprint

    async def read_again(self) -> None:
        """Have the core read it once more. Raises as `Driver.prepare` and `Reroutable.rerouted`."""
        request = Backend.FromString(self.request)
        plan = await self.driver.prepare(request.config, frozenset(request.exclude_inbounds))
        if self.rerouted is not None and isinstance(plan, Reroutable):
            await plan.rerouted(self.routing)

    async def with_routing(self, routing: Routing) -> Accepted:
        """The same with these changes of its routing. Raises `Unsupported`, and what `Reroutable.rerouted` raises."""
        if routing == Routing():
            return replace(self, rerouted=None)
        if not isinstance(self.plan, Reroutable):
            raise Unsupported(FIXED)
        return replace(self, rerouted=await self.plan.rerouted(routing))


@dataclass
class Held:
    """The backend that a Start replaces. It may come back, so it follows what is said of users meanwhile."""

    accepted: Accepted | None
    roster: Roster


class Limiter(Protocol):
    """Knows who is off by their limits, of those who are wanted and of others: see `node.limits`."""

    def learn(self, said: Collection[bytes]) -> None:
        """This is about to be said of limits. Called in another thread, where there is much of it."""

    def install(self, said: Mapping[str, bytes], users: Collection[str]) -> AbstractSet[str]:
        """All users are these, and some say this of limits, packed: both change as they do. Returns who is off."""

    def follow(self, key: str) -> bool:
        """This user was added, changed or removed, which is in what was installed. Returns whether they are off."""


class _Unlimited:
    """Nobody is off."""

    def learn(self, said: Collection[bytes]) -> None:
        pass

    def install(self, _: Mapping[str, bytes], __: Collection[str]) -> AbstractSet[str]:
        return frozenset()

    def follow(self, _: str) -> bool:
        return False


# A roster, and who could not be used.
Built = tuple[Roster, list[Refusal]]
# Makes a roster of another one of the same backend, and says who could not be used.
Build = Callable[[Accepted | None, Roster], Awaitable[tuple[Roster, list[Refusal]]]]


class Desired:
    """The one backend, if any, and its users."""

    def __init__(self, reactor: PooledReactor, record: Record) -> None:
        self._reactor = reactor
        self._recorder = Recorder(record)
        self._memory = Memory(reactor)
        self._held: Held | None = None
        self.accepted: Accepted | None = None
        self.roster = no_users()
        self.limiter: Limiter = _Unlimited()
        # How often a user was refused, by the node or a core, since the node began.
        self.refusals = 0

    @property
    def target(self) -> Mapping[str, Accounts]:
        """The accounts that a core should have, by inbound."""
        return self.roster.target

    @property
    def standing(self) -> Roster:
        """The users of the runs that there are, also while another backend is tried."""
        return self._held.roster if self._held and self._held.accepted else self.roster

    @property
    def before(self) -> Accepted | None:
        """What was accepted before the backend that is tried; where none is, what is accepted."""
        return self._held.accepted if self._held else self.accepted

    # The backend

    def hold(self, wanted: Accepted, roster: Roster, restorable: bool) -> None:
        """Another backend is tried: `keep` or `give_up` follows. What is not restorable does not come back."""
        self._held = Held(self.accepted, self.roster) if restorable else Held(None, no_users())
        self.accepted = wanted
        self._install(roster)
        self._recorder.stage(roster)

    def keep(self) -> None:
        """The other backend runs."""
        assert self._held is not None and self.accepted is not None
        replaced, self._held = self._held.roster, None
        self._recorder.backend(*self.accepted.recorded, replaced, self.roster)

    def give_up(self) -> None:
        """The other backend does not run: the one before it is wanted again."""
        assert self._held is not None
        held, self._held = self._held, None
        self.accepted = held.accepted
        self._install(held.roster)
        self._recorder.unstage()

    def confirm(self, request: Backend, roster: Roster) -> None:
        """The backend that runs was asked for again, with these users."""
        assert self.accepted is not None
        before = self.roster
        self.accepted = replace(self.accepted, request=without_users(request), keep_alive=request.keep_alive)
        self._install(roster)
        self._recorder.backend(*self.accepted.recorded, before, roster)

    async def revert(self, accepted: Accepted) -> list[Refusal]:
        """An earlier backend is wanted again, with the users of now, as far as it has their inbounds.

        Returns who cannot be used there.
        """
        roster, refused = await self.build(accepted, await self.users())
        before, self.accepted = self.roster, accepted
        self._install(roster)
        self._recorder.backend(*accepted.recorded, before, roster)
        return refused

    def clear(self) -> None:
        """No backend is wanted."""
        self.accepted = None
        self._install(no_users())

    def reroute(self, accepted: Accepted) -> None:
        """The routing of what runs is as this one has it."""
        self.accepted = accepted

    def keep_routing(self) -> None:
        """It is in force."""
        assert self.accepted is not None
        self._recorder.routing(self.accepted.routing.pack())

    # Users

    async def wanted(self) -> Mapping[str, bytes]:
        """All who are wanted, by key, as the roster keeps them; without a backend, those whom a resume brings back."""
        left = await self._recorder.left(self._in_pool) if self.accepted is None else {}
        # They may be back by now, or others are wanted instead.
        return left if self.accepted is None else self.roster.users

    def change(
        self, users: Sequence[User], change: Callable[[Roster], tuple[Pairs, list[Refusal]]]
    ) -> tuple[Pairs, list[Refusal]]:
        """Have `change` add, change or remove these users: see `Roster.put`."""
        with self._recorder.following((self._held or self).roster, users):
            if self._held:
                change(self._held.roster)
            touched, refused = change(self.roster)
            for key in {key_of(user.email) for user in users}:
                off = self.limiter.follow(key)
                for roster in self._rosters:
                    touched |= roster.turn(key, off)
            return touched, refused

    def keep_out(self, off: AbstractSet[str]) -> Pairs:
        """These users and no others are off by their limits. Returns what is touched by that."""
        return Pairs().union(*(roster.keep_out(off) for roster in self._rosters))

    @property
    def _rosters(self) -> list[Roster]:
        return [self.roster, self._held.roster] if self._held else [self.roster]

    async def rebuild(self, build: Build, require: Callable[[], None]) -> list[Refusal]:
        """Have another roster, which is built on this one. Before each try `require` raises if users cannot be taken.

        Returns who could not be used.
        """
        while True:
            require()
            accepted, held = self.accepted, self._held
            roster, refused = await build(accepted, self.roster)
            spare, _ = await build(held.accepted, held.roster) if held else (no_users(), [])
            if accepted is self.accepted and held is self._held:
                break  # else a Start ended meanwhile, and what was built may not fit what runs
        if held:
            self._recorder.users(held.roster, spare)
            held.roster = spare
        else:
            self._recorder.users(self.roster, roster)
        self._install(roster)
        if held:
            held.roster.keep_out(roster.off)
        return refused

    async def users(self) -> Sequence[User]:
        """Those who are wanted now, in stored order, as they came."""
        packed = list(self.roster.users.values())
        return await self._in_pool(_unpacked, packed) if len(packed) > BUILD_INLINE else _unpacked(packed)

    async def read(self, users: Sequence[User]) -> Supplied:
        """These users, as far as nothing needs to be known of the backend."""
        return await self._in_pool(Supplied.of, users) if len(users) > BUILD_INLINE else Supplied.of(users)

    async def build(
        self, accepted: Accepted | None, users: Sequence[User] | Supplied, before: Roster | None = None
    ) -> tuple[Roster, list[Refusal]]:
        """The roster of these users. `before` is another of an alike backend; nobody changes it meanwhile."""
        if accepted is None:
            return no_users(), []
        plan = accepted.plan
        if len(users.users if isinstance(users, Supplied) else users) <= BUILD_INLINE:
            return Roster.of(users, plan.tags, plan.account, before)
        return await self._in_pool(self._learned, Roster.of, users, plan.tags, plan.account, before)

    async def build_on(
        self, accepted: Accepted | None, users: Sequence[User], roster: Roster
    ) -> tuple[Roster, list[Refusal]]:
        """The roster with these users added, changed or removed. Nobody changes it meanwhile."""
        return (no_users(), []) if accepted is None else await self._in_pool(self._learned, roster.updated, users)

    def _learned(self, build: Callable[..., tuple[Roster, list[Refusal]]], *arguments: object) -> Built:
        """What is built in the pool, and what its users say of limits read there, too."""
        roster, refused = build(*arguments)
        self.limiter.learn(roster.limits.values())
        return roster, refused

    # The record

    async def recorded(self) -> None:
        """Wait until what was said outlives the node."""
        await self._recorder.kept()

    def forget(self) -> None:
        """Nothing comes back after the node's end."""
        self._recorder.forget()

    def everything(self) -> Changes:
        """All that is to be recorded of the backend, for a record that has nothing."""
        return self._recorder.everything()

    def loaded(self, saved: Saved) -> bool:
        """An earlier node left this. Returns whether nothing has taken its place meanwhile."""
        if self._recorder.untouched:
            self._recorder.loaded(saved)
        return self._recorder.untouched

    def _install(self, roster: Roster) -> None:
        if max(len(roster.users), len(self.roster.users)) > BUILD_INLINE:
            self._memory.give_back_soon()
        self.roster = roster
        roster.keep_out(self.limiter.install(roster.limits, roster.users.keys()))

    def _in_pool(self, function: Callable[..., T], *arguments: object) -> Deferred[T]:
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), function, *arguments)


def _unpacked(packed: Iterable[bytes]) -> list[User]:
    return list(map(User.FromString, packed))


def without_users(request: Backend) -> bytes:
    """A backend as it is recorded: its users are recorded one by one."""
    kept = Backend(type=request.type, config=request.config, keep_alive=request.keep_alive)
    kept.exclude_inbounds.extend(request.exclude_inbounds)
    return kept.SerializeToString()


def no_users() -> Roster:
    """The roster of no backend."""
    return Roster((), _no_account)


def _no_account(_: str, __: User) -> Account | None:
    return None
