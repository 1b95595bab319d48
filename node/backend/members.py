"""What controllers say of users: taken into the desired set in the order in which it came, then brought to the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from node.backend import desired as desired_set
from node.backend.control import Control, Settled
from node.backend.desired import Build, Desired
from node.backend.faults import in_background
from node.backend.generations import Generations
from node.backend.reconcile import Pairs
from node.backend.roster import Roster
from node.backend.settling import Settling
from node.backend.state import Status
from node.contract.accounts import Refusal, key_of
from node.errors import NotInitialized, UsersRefused
from node.events.users import UserEvents
from protos.service_pb2 import User


class Members:
    """Adds, changes, removes and replaces users of the one backend."""

    def __init__(
        self,
        status: Status,
        control: Control,
        desired: Desired,
        generations: Generations,
        settling: Settling,
        events: UserEvents,
    ) -> None:
        self._status = status
        self._control = control
        self._desired = desired
        self._generations = generations
        self._settling = settling
        self._events = events
        self.recorded = desired.recorded

    async def put(self, user: User) -> tuple[Pairs, list[Refusal]]:
        """Take one user into the desired set, behind what came before. `settle` applies them."""
        await self._control.settled()
        touched, refused = self._put([user], lambda roster: roster.put(user))
        self._desired.refusals += len(refused)
        return touched, refused

    async def settle(self, touched: Pairs) -> list[Refusal]:
        """Wait until what was touched is in force; what the core refused of it. A core on its way takes it along."""
        refused = await self._settling.settle(touched)
        self._desired.refusals += len(refused)
        self._events.refused(refused)
        return refused

    async def replace(self, users: Sequence[User]) -> None:
        """The users are these and no others. Raises `UsersRefused` after all others were applied."""
        await self._rebuild(lambda accepted, roster: self._desired.build(accepted, users, roster))

    async def update(self, users: Sequence[User]) -> None:
        """Add, change or remove these users, as one. Raises `UsersRefused` after all others were applied."""
        if len(users) > desired_set.BUILD_INLINE:
            await self._rebuild(lambda accepted, roster: self._desired.build_on(accepted, users, roster))
            return
        await self._control.settled()
        touched, refused = self._put(users, lambda roster: roster.put_all(users))
        self._desired.refusals += len(refused)
        refused = refused + await self.settle(touched)
        await self.recorded()
        raise_refused(refused)

    async def in_turn(self) -> None:
        """Wait until what came before is taken into the desired set."""
        await self._control.settled()

    async def keep_out(self, off: AbstractSet[str]) -> None:
        """Have these users out, and no others, as their limits want it: they and what they claim stay as they are."""
        await self._control.quiet()
        await self.settle(self._desired.keep_out(off))

    @property
    def _in_grace(self) -> bool:
        """Stopped outwards, while a core waits for a Start that wants it."""
        return self._status.stopped and bool(self._generations.draining)

    def _require(self) -> None:
        """Users can be taken in while a core is on its way, too, and taken out while it waits for a Start."""
        if not (self._status.awaited or self._in_grace):
            self._status.require()

    def _put(
        self, users: Sequence[User], change: Callable[[Roster], tuple[Pairs, list[Refusal]]]
    ) -> tuple[Pairs, list[Refusal]]:
        self._require()
        touched, refused = self._desired.change(users, change)
        self._events.refused(refused)
        # What was said before may not be in force.
        touched |= self._settling.differing({key_of(user.email) for user in users})
        if self._in_grace:
            in_background(self.settle(touched), "users were not removed")
            raise NotInitialized
        return touched, refused

    async def _rebuild(self, build: Build) -> None:
        async def work(settled: Settled) -> None:
            refused = await self._desired.rebuild(build, self._require)
            settled()
            if self._in_grace:
                in_background(self._settling.settle_all(), "users were not removed")
                raise NotInitialized
            refused = refused + await self._settling.settle_all()
            self._desired.refusals += len(refused)
            self._events.refused(refused)
            raise_refused(refused)

        try:
            await self._control.run(work)
        finally:
            await self.recorded()


def raise_refused(refused: list[Refusal]) -> None:
    """Report users that could not be applied, if any."""
    if refused:
        raise UsersRefused([(email, reason) for email, reason in refused])
