"""Keeps the users of one run as they should be, and of the runs that take its place for the sake of users."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater

from node.backend.desired import Desired
from node.backend.faults import in_background
from node.backend.generations import Generations
from node.backend.health import lives
from node.backend.reconcile import Pairs, Reconciler
from node.backend.renewal import Renewal
from node.backend.state import State, Status
from node.contract.accounts import Change, Refusal, Unusable, diff, key_of
from node.contract.driver import Applied, Generation, Lingers, Plan, Shares
from node.errors import NodeError
from node.events.users import UserEvents
from node.logs import Logger
from protos.service_pb2 import User

# Users whom a line of the log names.
LISTED = 20
# Seconds after a removal in which the credential may stay in a core that keeps the user out.
REFRESH = 3.0
# Seconds after which another run is tried again that could not come in for that; and for which it waits at most rather
# than end one that drains, or everybody's sessions.
RETRY = 30.0
PATIENCE = 60.0
SESSIONS = 600.0


class Keeper:
    """Satisfies `node.backend.reconcile.Core`.

    The current run should have all desired users. One that drains, or that waits for a Start after a Stop, keeps whom
    it has, without those who were removed or have other credentials. Nothing is asked of a run that ends.
    """

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        run: Generation,
        plan: Plan,
        status: Status,
        desired: Desired,
        generations: Generations,
        renewal: Renewal,
        events: UserEvents,
        adopt: Callable[[Generation], None],
        doubt: Callable[[Generation], None],
    ) -> None:
        self.run = run
        self._plan = plan
        self._reactor = reactor
        self._status = status
        self._desired = desired
        self._generations = generations
        self._renewal = renewal
        self._events = events
        self._adopt = adopt
        self._doubt = doubt
        self._refreshing: IDelayedCall | None = None
        # Since when another run has been put off for what it costs.
        self._patient_since: float | None = None
        reconciler = Reconciler(self, partial(deferLater, reactor))
        self.settle: Callable[[Pairs], Deferred[list[Refusal]]] = reconciler.settle
        self.unsettled, self.idle, self._repair = reconciler.unsettled, reconciler.idle, reconciler.repair
        self._alone = reconciler.alone
        self.busy, self.restless, self.reasons = reconciler.busy, reconciler.restless, reconciler.reasons

    @property
    def serves(self) -> bool:
        """Whether its run is the current one, of what was accepted."""
        return self._status.running and self.run is self._generations.current

    @property
    def drains(self) -> bool:
        """Whether its run has connections and gets no other users: it drains, or waits for a Start.

        It waits until the core of a Start is there, too; only one that goes on meanwhile is asked for anything.
        """
        if self._is_starting:
            return isinstance(self.run, Shares) and self.run in self._generations.serving
        return self.run in self._generations.draining

    @property
    def _is_starting(self) -> bool:
        return self._status.state is State.STARTING

    @property
    def _is_renewed(self) -> bool:
        """Whether another run is taking the place of its run. That one begins with what this one had."""
        return self._status.running and self._generations.current is None and not self.drains

    def window(self, collected: float) -> float:
        # Only the current run gets another one for what is collected.
        return self._renewal.window(collected) if self.serves else 0.0

    async def repair(self) -> None:
        """Settle whatever differs, and see to removed users whose credentials it still knows."""
        self.refresh_soon()
        await self._repair()

    def changes(self, touched: Iterable[tuple[str, str]]) -> list[Change]:
        have, wanted = self.run.accounts, self._desired.target
        if self.serves:
            here = [Change(tag, key, wanted[tag].get(key)) for tag, key in touched if tag in wanted]
            return [change for change in here if have[change.tag].get(change.key) != change.packed]
        if self.drains:
            return [Change(tag, key, None) for tag, key in touched if self._outstayed(tag, key)]
        return []

    def differences(self) -> list[Change]:
        have = self.run.accounts
        if self.serves or self._is_renewed:
            return diff(have, self._desired.target)
        # Most of them stay, which is told faster here.
        wanted = self._desired.standing.target
        looked = [(tag, some.items(), want) for tag, some in have.items() if some != (want := wanted.get(tag, {}))]
        return self.changes((tag, key) for tag, some, want in looked for key, packed in some if want.get(key) != packed)

    def touched(self, keys: Iterable[str]) -> Pairs:
        """What these users have or should have here."""
        return {(tag, key) for key in keys for tag in self.run.accounts}

    def _outstayed(self, tag: str, key: str) -> bool:
        """Whether a run that drains has somebody who was removed, or an account that is not theirs any more."""
        packed, roster = self.run.accounts.get(tag, {}).get(key), self._desired.standing
        target = roster.target
        if packed is None or target.get(tag, {}).get(key) == packed:
            return False
        if tag in target and key not in target[tag]:
            return True
        user = roster.users.get(key)
        return user is None or key in roster.off or self._account(tag, User.FromString(user)) != packed

    def _account(self, tag: str, user: User) -> bytes | None:
        """What the user would have here, by the configuration of this run: that of another may say it otherwise."""
        try:
            account = self._plan.account(tag, user)
        except Unusable:
            return None
        return account.packed if account else None

    async def apply(self, changes: list[Change]) -> Applied:
        """Have the run take these. What it keeps though it answers is left for another run, which does not know it."""
        leaving = self._leaving(changes)
        applied = await self._apply(changes)
        self._tell_cut(leaving)
        return applied

    async def _apply(self, changes: list[Change]) -> Applied:
        run = self.run
        refused, left = await self._ask(changes)
        self.refresh_soon()
        if not refused:
            return Applied([], left)
        if not await self._answers():
            return Applied(refused if run.alive else [], left)
        # What ran out of time may have been done.
        await self._audit()
        if kept := self.kept(changes, left):
            refused = refused + (await self._ask(kept)).refused
        if not (self.serves or self.drains):
            return Applied([], [])
        if kept := self.kept(changes, left):
            names = sorted({change.key for change in kept})
            told = "the core keeps {count} users who were removed, and is ended: {users}"
            self.log.error(told, count=len(names), users=", ".join(names[:LISTED]))
        differ = {change.key for change in changes if self._packed(change) != change.packed}
        differ -= {change.key for change in kept}
        refused = [refusal for refusal in dict.fromkeys(refused) if key_of(refusal.email) in differ]
        return Applied(refused, left + kept)

    async def renew(self, left: list[Change]) -> list[Refusal]:
        if self.drains:
            # The one that a Start may fall back on is not ended: the next run, or the end of the Start, sees to it.
            if not self._is_starting:
                await self._renewal.end(self.run)
            return []
        if not self.serves:
            return []
        leaving = self._leaving(left)
        run, refused = await self._renewal.renew(self.run, left)
        self._take(run)
        self._tell_cut(leaving)
        return refused

    def _leaving(self, changes: Iterable[Change]) -> list[str]:
        """Who is to be taken out of an inbound in which they are."""
        return list(dict.fromkeys(change.key for change in changes if change.packed is None and self._packed(change)))

    def _tell_cut(self, leaving: list[str]) -> None:
        """Those of them who are in none any more."""
        if self.serves:
            there, off = self.run.accounts.values(), self._desired.roster.off
            gone = (key for key in leaving if key not in off)
            self._events.cut(key for key in gone if not any(key in accounts for accounts in there))

    def _take(self, run: Generation) -> None:
        if run is not self.run:
            # Before it is the current one: that it has a keeper must be known.
            self.run = run
            self._patient_since = None
            self._adopt(run)

    @property
    def _lingers(self) -> bool:
        return self.serves and isinstance(self.run, Lingers) and self.run.lingering

    def refresh_soon(self, seconds: float = REFRESH) -> None:
        """Have another run come in that knows nothing of removed users; with those who are removed soon after them."""
        if not self._lingers:
            self._patient_since = None
        elif self._refreshing is None:
            self._refreshing = self._reactor.callLater(seconds, self._refresh)

    def _refresh(self) -> None:
        self._refreshing = None
        if self._is_patient():
            self.refresh_soon()
        else:
            self._patient_since = None
            in_background(self._alone(self._refreshed), "removed users are kept out without another run")

    def _is_patient(self) -> bool:
        """Whether nobody's connections are to end yet for the sake of users who are kept out anyway."""
        now = self._reactor.seconds()
        self._patient_since = now if self._patient_since is None else self._patient_since
        return now - self._patient_since < self._patience

    @property
    def _patience(self) -> float:
        """Seconds for which it may be put off, by what another run costs."""
        if isinstance(self.run, Shares) and self.run.ends_sessions:
            return SESSIONS
        return PATIENCE if self._renewal.crowded else 0.0

    async def _refreshed(self) -> None:
        if self._lingers:
            self._take(await self._renewal.refresh(self.run))
            # If that could not be done.
            self.refresh_soon(RETRY)

    def kept(self, changes: Iterable[Change], left: Iterable[Change] = ()) -> list[Change]:
        """Those of the changes, but the ones that are left, which take something away that is still in force."""
        later = set(left)
        have = [(self._packed(change), change) for change in changes if change not in later]
        return [change for packed, change in have if packed is not None and packed != change.packed]

    def _packed(self, change: Change) -> bytes | None:
        return self.run.accounts.get(change.tag, {}).get(change.key)

    async def _ask(self, changes: list[Change]) -> Applied:
        if not (self.serves or self.drains):
            return Applied([], [])
        try:
            return await self.run.apply(changes)
        except Exception:
            # Whoever waits is told; and nobody knows now what is in force.
            if self.run.alive:
                await self._answers()
            if not (self.serves or self.drains):
                return Applied([], [])
            raise

    async def _answers(self) -> bool:
        """Whether the run answers after something went wrong. One that lives and does not is looked after at once."""
        run = self.run
        answers = await lives(run, self._reactor)
        if not answers and run.alive:
            self._doubt(run)
        return answers

    async def _audit(self) -> None:
        try:
            await self.run.audit()
        except NodeError as error:
            self.log.warn("the core's users were not compared: {reason}", reason=error.text)
