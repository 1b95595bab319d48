"""Who may use the backend: what controllers say, and what its core acknowledged.

Two sets of users: the desired one (`roster`) and the confirmed one (the generation's accounts). While a core is on its
way, syncs change the desired set and succeed; the confirmed one follows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, TimeoutError, ensureDeferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from node.backend.control import Control, Settled
from node.backend.generations import Generations
from node.backend.reconcile import Pairs, Reconciler
from node.backend.record import Record, Recorder
from node.backend.roster import Roster
from node.contract.accounts import Account, Accounts, Change, Refusal, apply, key_of
from node.contract.driver import Driver, Generation
from node.errors import Aborted, CoreFailed, NodeError, NotInitialized, NotStarted, UsersRefused
from node.logs import Logger, LogRing
from node.machine.malloc import Memory
from node.reactor import PooledReactor
from node.state.database import Changes, Saved
from protos.service_pb2 import User

T = TypeVar("T")

# Above this many users a roster is built in the reactor's pool.
BUILD_INLINE = 5000
# Seconds that a core which refused something may take to show that it lives.
LIVES = 1.0
# Seconds that a core may take which comes up in the place of one that keeps somebody who was removed.
RENEWAL = 5.0


@dataclass(frozen=True)
class Accepted:
    """A backend that was asked for and accepted: what a core is run from, again and again if need be.

    `request` is the serialised Backend without its users, `keep_alive` what that says of it.
    """

    request: bytes
    keep_alive: int
    driver: Driver
    plan: Any
    version: str
    # The configuration by its meaning; equal ones need no other core.
    fingerprint: tuple[str, str, frozenset[str]]


@dataclass
class Held:
    """The backend that a Start replaces. It may come back, so it follows what is said of users meanwhile."""

    accepted: Accepted | None
    roster: Roster


# Makes a roster of another one of the same backend, and says who could not be used.
Build = Callable[[Accepted | None, Roster], Awaitable[tuple[Roster, list[Refusal]]]]


class Members:
    """The users of the one backend. `node.backend.runner` runs it."""

    log = Logger()

    def __init__(self, reactor: PooledReactor, ring: LogRing, record: Record, generations: Generations) -> None:
        self._reactor = reactor
        self._ring = ring
        self._recorder = Recorder(record)
        self._control = Control()
        self._memory = Memory(reactor)
        self._reconciler = Reconciler(self._wanted, self._confirmed, self._apply, self._window, self._sleep, self._free)
        self._held: Held | None = None
        # What the last Start takes away that is in force.
        self._leaving: list[Change] = []
        self.roster = no_users()
        self.accepted: Accepted | None = None
        self.generations = generations
        self.state = "stopped"
        self.reason = ""
        # Stopped outwards, while the core waits for a Start that wants it.
        self.in_grace = False

    def require(self) -> None:
        """Raises what a call that needs a running core fails with."""
        if self.state in ("starting", "restarting"):
            raise NotStarted(self.reason or self.state)
        if self.state == "failed":
            raise CoreFailed(f"the core is down: {self.reason}")
        if self.state != "running":
            raise NotInitialized

    def current(self) -> Generation:
        """The core to ask. Raises as `require`, and while one takes the place of another."""
        self.require()
        if self.generations.current is None:
            raise NotStarted("users are being applied")
        return self.generations.current

    def _say(self, state: str, reason: str) -> None:
        """Enter a state: `info` tells it, and so do the logs."""
        self.state, self.reason = state, reason
        self._ring.event(f"backend {state}" + (f": {reason}" if reason else ""))
        self.log.info("backend {state} {reason}", state=state, reason=reason)

    async def put(self, user: User) -> tuple[Pairs, list[Refusal]]:
        """Take one user into the desired set, behind what came before. `settle` brings him into force."""
        await self._control.settled()
        return self._desire([user], lambda roster: roster.put(user))

    async def settle(self, touched: Pairs) -> list[Refusal]:
        """Wait until what was touched is in force; what the core refused of it. A core on its way takes it along."""
        if not touched or self.state != "running":
            return []
        return await self._reconciler.settle(touched)

    async def replace(self, users: Sequence[User]) -> None:
        """The users are these and no others. Raises `UsersRefused` after all others were applied."""
        await self._change(lambda accepted, roster: self._build(accepted, users, roster))

    async def update(self, users: Sequence[User]) -> None:
        """Add, change or remove these users, as one. Raises `UsersRefused` after all others were applied."""
        if len(users) > BUILD_INLINE:
            await self._change(lambda accepted, roster: self._build_on(accepted, users, roster))
            return
        await self._control.settled()
        touched, refused = self._desire(users, lambda roster: roster.put_all(users))
        refused = refused + await self.settle(touched)
        await self.recorded()
        raise_refused(refused)

    async def recorded(self) -> None:
        """Wait until what was said of users outlives the node."""
        await self._recorder.kept()

    async def _change(self, build: Build) -> None:
        """Have another roster, which is built on the one that there is."""
        try:
            await self._control.run(lambda settled: self._replace(build, settled))
        finally:
            await self.recorded()

    async def _replace(self, build: Build, settled: Settled) -> None:
        while True:
            self._require_desired()
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
        self._install(roster, settled)
        touched = self._reconciler.unsettled(self._reconciler.differences())
        self._require_started(touched)
        raise_refused(refused + await self.settle(touched))

    def _desire(
        self, users: Sequence[User], change: Callable[[Roster], tuple[Pairs, list[Refusal]]]
    ) -> tuple[Pairs, list[Refusal]]:
        self._require_desired()
        with self._recorder.following((self._held or self).roster, users):
            if self._held:
                change(self._held.roster)
            touched, refused = change(self.roster)
        # What was said before may not be in force.
        touched |= self._differing({key_of(user.email) for user in users})
        self._require_started(touched)
        return touched, refused

    def _differing(self, keys: Iterable[str]) -> Pairs:
        confirmed = self._confirmed()
        return {
            (tag, key)
            for tag, target in self.roster.target.items()
            for key in keys
            if confirmed.get(tag, {}).get(key) != target.get(key)
        }

    def everything(self) -> Changes:
        """All that is to be recorded of the backend, for a record that has nothing."""
        return self._recorder.everything()

    def loaded(self, saved: Saved) -> bool:
        """An earlier node left this. Returns whether nothing has taken its place meanwhile."""
        if self._recorder.untouched:
            self._recorder.loaded(saved)
        return self._recorder.untouched

    def _require_desired(self) -> None:
        """Users can be taken in while a core is on its way, too, and taken out while it waits for a Start."""
        if self.state not in ("starting", "restarting") and not self.in_grace:
            self.require()

    def _require_started(self, touched: Pairs) -> None:
        """Who is removed is out at once, from a core that is stopped only outwards as well. Then it is an error."""
        if self.in_grace:
            self._in_background(self._reconciler.settle(touched), "users were not removed")
            raise NotInitialized

    async def _settle_all(self) -> list[Refusal]:
        differences = self._reconciler.differences()
        self._leaving = self._kept(differences)
        return await self.settle(self._reconciler.unsettled(differences))

    def _install(self, roster: Roster, settled: Settled) -> None:
        if max(len(roster.users), len(self.roster.users)) > BUILD_INLINE:
            self._memory.give_back_soon()
        self.roster = roster
        settled()

    async def _build(
        self, accepted: Accepted | None, users: Sequence[User], before: Roster | None = None
    ) -> tuple[Roster, list[Refusal]]:
        """The roster of these users. `before` is another of the same backend; nobody changes it meanwhile."""
        if accepted is None:
            return no_users(), []
        plan = accepted.plan
        if len(users) <= BUILD_INLINE:
            return Roster.of(users, plan.tags, plan.account, before)
        return await self._in_pool(Roster.of, users, plan.tags, plan.account, before)

    async def _build_on(
        self, accepted: Accepted | None, users: Sequence[User], roster: Roster
    ) -> tuple[Roster, list[Refusal]]:
        """The roster with these users added, changed or removed. Nobody changes it meanwhile."""
        return (no_users(), []) if accepted is None else await self._in_pool(roster.updated, users)

    def _in_pool(self, function: Callable[..., T], *arguments: object) -> Deferred[T]:
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), function, *arguments)

    def _wanted(self) -> Mapping[str, Accounts]:
        """What the core shall have now. Nothing is asked of one that ends, with accounts of the next least of all."""
        if self.in_grace:
            return common(self._confirmed(), self.roster.target)
        return self.roster.target if self.state == "running" else {}

    def _confirmed(self) -> Mapping[str, Accounts]:
        current = self.generations.current
        return current.accounts if current else {tag: {} for tag in self.roster.target}

    def _window(self) -> float:
        return self.accepted.driver.window if self.accepted else 0.0

    def _free(self, changes: list[Change]) -> list[Change]:
        current = self.generations.current
        return current.free(changes) if current else changes

    async def _sleep(self, seconds: float) -> None:
        await deferLater(self._reactor, seconds)

    async def _apply(self, changes: list[Change]) -> list[Refusal]:
        """Who was refused. A core that went away meanwhile takes the changes along when it comes again."""
        fault: Exception = CoreFailed("no core was left after a change of users")
        try:
            return await self._bring(changes)
        except Exception as caught:
            fault = caught
            if self.generations.current:
                await self._answers(self.generations.current)
            raise
        finally:
            if not self.generations.current and self.state == "running":
                self._gone(fault)

    async def _bring(self, changes: list[Change]) -> list[Refusal]:
        """Have the core take these changes. One that answers and keeps somebody who is removed is replaced."""
        refused = await self._ask(changes)
        current = self.generations.current
        if not refused or not current:
            return []
        if not await self._answers(current):
            return refused if self.generations.current else []
        # What ran out of time may have been done.
        await self._audit(current)
        if kept := self._kept(changes):
            refused = refused + await self._ask(kept)
        if kept := self._kept(changes):
            refused = refused + await self._run_without(kept)
        if not self.generations.current or not self._may_ask:
            return []
        confirmed = self._confirmed()
        left = {change.key for change in changes if confirmed.get(change.tag, {}).get(change.key) != change.packed}
        return [refusal for refusal in dict.fromkeys(refused) if key_of(refusal.email) in left]

    @property
    def _may_ask(self) -> bool:
        """Whether the core that runs is that of what was accepted. Else a Start came meanwhile, and ends it."""
        return self.state == "running" or self.in_grace

    async def _ask(self, changes: list[Change]) -> list[Refusal]:
        asked = self.generations.current
        if asked is None or self.accepted is None or not self._may_ask:
            return []
        generation, refused = await self.accepted.driver.apply(asked, changes, self._end_one)
        if generation is not asked:
            self._adopt(generation)
        return refused

    async def _answers(self, generation: Generation) -> bool:
        """Whether a core answers after something went wrong. One that lives and does not is looked after at once."""
        deadline = self._reactor.seconds() + LIVES
        if await generation.answers(LIVES):
            return True
        # Calls to a core that was killed fail before its end is known.
        left = max(0.0, deadline - self._reactor.seconds())
        try:
            await generation.when_exited().addTimeout(left, self._reactor)
        except TimeoutError:
            self._doubt(generation)
        return False

    async def _audit(self, generation: Generation) -> None:
        try:
            await generation.audit()
        except NodeError as fault:
            self.log.warn("the core's users were not compared: {reason}", reason=fault.text)

    def _kept(self, changes: Iterable[Change]) -> list[Change]:
        """Those of the changes that take something away which is still in force."""
        confirmed = self._confirmed()
        have = [(confirmed.get(change.tag, {}).get(change.key), change) for change in changes]
        return [change for packed, change in have if packed is not None and packed != change.packed]

    async def _run_without(self, kept: list[Change]) -> list[Refusal]:
        """Another run of the core, which does not know who was removed. One that waits for a Start just ends."""
        generation = self.generations.current
        if generation is None or not self._may_ask:
            return []
        names = sorted({change.key for change in kept})
        self.log.error("the core is replaced, since it keeps users who were removed: {names}", names=names)
        accounts = apply([change._replace(packed=None) for change in kept], generation.accounts)
        await self._end_one(generation)
        if self.accepted is None or self.state != "running":
            return []
        self._adopt(await self.accepted.driver.launch(self.accepted.plan, accounts, RENEWAL))
        return await self._ask([change for change in kept if change.packed is not None])

    async def _end_one(self, generation: Generation) -> None:
        """End a core when all that it served is counted."""
        raise NotImplementedError

    def _adopt(self, generation: Generation) -> None:
        """A new run of the core is the newest."""
        raise NotImplementedError

    def _doubt(self, generation: Generation) -> None:
        """A core lives and does not answer: what it was asked for may not be in force."""
        raise NotImplementedError

    def _gone(self, fault: Exception) -> None:
        """No core runs after a batch, and one shall."""
        raise NotImplementedError

    def _in_background(self, work: Coroutine[Any, Any, Any] | Deferred[Any], text: str) -> None:
        """Nobody waits for it: what goes wrong is logged, as `text`. That a Stop ended it is not wrong."""

        def failed(failure: Failure) -> None:
            if not failure.check(Aborted):
                self.log.failure(text, failure)

        ensureDeferred(work).addErrback(failed)


def raise_refused(refused: list[Refusal]) -> None:
    """Report users that could not be applied, if any."""
    if refused:
        raise UsersRefused([(email, reason) for email, reason in refused])


def common(one: Mapping[str, Accounts], other: Mapping[str, Accounts]) -> dict[str, Accounts]:
    """The accounts that are equal in both."""
    return {
        tag: {key: packed for key, packed in accounts.items() if other.get(tag, {}).get(key) == packed}
        for tag, accounts in one.items()
    }


def no_users() -> Roster:
    """The roster of no backend."""
    return Roster((), _no_account)


def _no_account(_: str, __: User) -> Account | None:
    return None
