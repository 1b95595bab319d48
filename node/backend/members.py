"""Changes of users by controllers: taken into the desired state in the order in which they come, then applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager

from node.backend import desired as desired_set
from node.backend.context import Context, Worker
from node.backend.control import Settled
from node.backend.desired import Build
from node.backend.faults import answered, in_background
from node.backend.reconcile import Pairs
from node.backend.roster import Roster
from node.backend.settling import Settling
from node.base.errors import NotInitialized, UsersRefused
from node.contract.accounts import Refusal, key_of
from protos.service_pb2 import User


class Members(Worker):
    """Adds, changes, removes and replaces users of the one backend."""

    def __init__(self, context: Context, settling: Settling) -> None:
        super().__init__(context)
        self._settling = settling
        self.recorded = context.desired.recorder.kept

    async def apply(self, user: User) -> list[Refusal]:
        """Add, change or remove one user, after all earlier operations. Returns the refusals."""

        async def work() -> list[Refusal]:
            touched, refused = await self.put(user)
            return refused + await self.settle(touched)

        return await answered(self._reactor, work(), "applying the user")

    async def put(self, user: User) -> tuple[Pairs, list[Refusal]]:
        """Take one user into the desired state, after all earlier operations. `settle` applies them."""
        return await self._put([user], lambda roster: roster.put(user))

    async def settle(self, touched: Pairs) -> list[Refusal]:
        """Wait until the core has applied these pairs. Returns its refusals. A starting core comes up with them."""
        refused = await self._settling.settle(touched)
        self._desired.refusals += len(refused)
        self._events.refused(refused)
        return refused

    async def replace(self, users: Sequence[User]) -> None:
        """Replace all users by these. Raises `UsersRefused` after all others were applied."""
        leaving: AbstractSet[str] = frozenset()
        if not self._control.is_settled:
            leaving = self._desired.roster.users.keys() - {key_of(user.email) for user in users if user.inbounds}
        await self._rebuild(lambda accepted, roster: self._desired.build(accepted, users, roster), leaving)

    async def update(self, users: Sequence[User]) -> None:
        """Add, change or remove these users as one change. Raises `UsersRefused` after all others were applied."""
        if len(users) > desired_set.BUILD_INLINE:
            await self._rebuild(
                lambda accepted, roster: self._desired.build_on(accepted, users, roster), _leaving(users)
            )
            return

        async def work() -> list[Refusal]:
            touched, refused = await self._put(users, lambda roster: roster.put_all(users))
            return refused + await self.settle(touched)

        try:
            refused = await answered(self._reactor, work(), "applying the users")
        finally:
            await self.recorded()
        raise_refused(refused)

    async def in_turn(self) -> None:
        """Wait until all earlier operations are in the desired state."""
        await self._control.settled()

    async def keep_out(self, off: AbstractSet[str]) -> list[Refusal]:
        """Take these users out of the core, and no others, for their limits: they and their claims stay in the roster.

        `off` may change while this waits for earlier operations. Returns the refusals of users who come in again.
        """
        before = frozenset(off)
        if not self._control.is_settled:
            with self._barring(before):
                await self._control.quiet()
        # An earlier call may not have reached the core. Users who are not off any more come in again.
        return await self.settle(self._desired.keep_out(off) | self._settling.differing(before | off))

    async def _settled(self, leaving: Collection[str]) -> None:
        """Wait until the users of all earlier operations are final; bar the leaving users meanwhile."""
        if self._control.is_settled:
            await self._control.settled()
        else:
            with self._barring(leaving):
                await self._control.settled()

    @contextmanager
    def _barring(self, keys: Collection[str]) -> Iterator[None]:
        with self._desired.barring(keys):
            in_background(
                self._settling.put_out(keys),
                "removed users could not be taken out at once: they stay in until earlier calls are done",
            )
            yield

    @property
    def _in_grace(self) -> bool:
        """Whether the backend is stopped for controllers while its core waits for a Start (STOP_GRACE)."""
        return self._status.stopped and bool(self._generations.draining)

    def _require(self) -> None:
        """Raise if users cannot be changed now: they can also while a core starts, or waits for a Start."""
        if not (self._status.awaited or self._in_grace):
            self._status.require()

    async def _put(
        self, users: Sequence[User], change: Callable[[Roster], tuple[Pairs, list[Refusal]]]
    ) -> tuple[Pairs, list[Refusal]]:
        await self._settled(_leaving(users))
        self._require()
        touched, refused = self._desired.change(users, change)
        self._events.refused(refused)
        # Earlier changes of these users may not have been applied.
        touched |= self._settling.differing({key_of(user.email) for user in users})
        if self._in_grace:
            in_background(self.settle(touched), "users could not be removed from the core")
            raise NotInitialized
        self._desired.refusals += len(refused)
        return touched, refused

    async def _rebuild(self, build: Build, leaving: Collection[str]) -> None:
        waiting = ExitStack()

        async def work(settled: Settled) -> None:
            refused = await self._desired.rebuild(build, self._require)
            # From here on the roster has the removals: barring is over.
            waiting.close()
            settled()
            if self._in_grace:
                in_background(self._settling.settle_all(), "users could not be removed from the core")
                raise NotInitialized
            refused = refused + await self._settling.settle_all()
            self._desired.refusals += len(refused)
            self._events.refused(refused)
            raise_refused(refused)

        async def in_turn() -> None:
            with waiting:
                if not self._control.is_settled:
                    waiting.enter_context(self._barring(leaving))
                await self._control.run(work)

        try:
            await answered(self._reactor, in_turn(), "applying the users")
        finally:
            await self.recorded()


def _leaving(users: Iterable[User]) -> list[str]:
    """The keys of users whom a controller removes: it sends them without inbounds."""
    return [key_of(user.email) for user in users if not user.inbounds]


def raise_refused(refused: list[Refusal]) -> None:
    """Raise `UsersRefused` for refused users, if any."""
    if refused:
        raise UsersRefused([(email, reason) for email, reason in refused])
