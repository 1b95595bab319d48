"""Keeps the users of one run of the core in step with the wanted users, for as long as it lives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from node.backend.context import Context, Worker
from node.backend.desired import Accepted
from node.backend.health import Watch, lives
from node.backend.reconcile import Pairs, Reconciler
from node.backend.state import State
from node.base.errors import NodeError
from node.base.logs import Logger
from node.contract.abilities import Shares
from node.contract.accounts import Change, Unusable, diff, key_of
from node.contract.driver import Applied, Generation
from node.contract.generations import Follower
from protos.service_pb2 import User

# Users that a log line names at most.
LISTED = 20


class Keeper(Worker, Reconciler):
    """Applies changes of users to its run.

    The current run, and one that takes over, should have all wanted users. A draining run, or one that waits for a
    Start after a Stop, keeps the users that it has, except removed ones and those with new credentials. An ending run
    gets no changes.
    """

    log = Logger()

    def __init__(self, context: Context, run: Generation, accepted: Accepted, watch: Watch) -> None:
        Worker.__init__(self, context)
        Reconciler.__init__(self)
        self.run = run
        # The backend that was accepted when the run served last.
        self.accepted = accepted
        self._watch = watch

    @property
    def serves(self) -> bool:
        """Whether its run is the current one, and the backend is running."""
        return self._status.running and self.run is self._generations.current

    @property
    def takes_over(self) -> bool:
        """Whether its run gets new connections already but is not the current one yet.

        Not a run that a Start of another backend is about to give up: its accounts may be of another kind.
        """
        wanted = self._desired.accepted
        return self.run in self._generations.taking_over and wanted is not None and self.accepted.means(wanted)

    @property
    def drains(self) -> bool:
        """Whether its run only loses users: it drains, or waits for a Start.

        During a Start this holds for the current run, too, if it can share its listeners with the new one; else it gets
        no changes at all.
        """
        if self._status.state is State.STARTING:
            return isinstance(self.run, Shares) and self.run in self._generations.serving and not self.takes_over
        return self.run in self._generations.draining

    @property
    def admits(self) -> bool:
        """Whether its run gets new connections, so that it should have all wanted users."""
        return self.serves or self.takes_over

    @property
    def is_asked(self) -> bool:
        """Whether changes are applied to its run at all."""
        return self.admits or self.drains

    def changes(self, touched: Iterable[tuple[str, str]]) -> list[Change]:
        have, wanted = self.run.accounts, self._desired.target
        if self.admits:
            here = [Change(tag, key, wanted[tag].get(key)) for tag, key in touched if tag in wanted and tag in have]
            return [change for change in here if have[change.tag].get(change.key) != change.packed]
        if self.drains:
            return [Change(tag, key, None) for tag, key in touched if self._must_leave(tag, key)]
        return []

    def differences(self) -> list[Change]:
        """All changes that the run needs. Takes a while with many users."""
        have = self.run.accounts
        if self.admits:
            return diff(have, self._desired.target)
        # Whole inbounds are compared first: most of them are equal.
        wanted = self._desired.serving_roster.target
        looked = [(tag, some.items(), want) for tag, some in have.items() if some != (want := wanted.get(tag, {}))]
        return self.changes((tag, key) for tag, some, want in looked for key, packed in some if want.get(key) != packed)

    def touched(self, keys: Iterable[str]) -> Pairs:
        """The (tag, key) pairs of these users in all inbounds of the run."""
        return {(tag, key) for key in keys for tag in self.run.accounts}

    def _must_leave(self, tag: str, key: str) -> bool:
        """Whether a draining run still has a removed user, or one by an old credential."""
        packed, roster = self.run.accounts.get(tag, {}).get(key), self._desired.serving_roster
        target = roster.target
        if packed is not None and self._desired.is_barred(key):
            return True
        if packed is None or target.get(tag, {}).get(key) == packed:
            return False
        if tag in target and key not in target[tag]:
            return True
        user = roster.users.get(key)
        if user is None or key in roster.off:
            return True
        account = self._account(tag, User.FromString(user))
        return account is None or not self.accepted.plan.same_credential(account, packed)

    def _account(self, tag: str, user: User) -> bytes | None:
        """The user's account by this run's own configuration, which may differ from the wanted one."""
        try:
            account = self.accepted.plan.account(tag, user)
        except Unusable:
            return None
        return account.packed if account else None

    async def apply(self, changes: list[Change]) -> Applied:
        """Apply changes to the run. Removals that it does not perform though it answers are left for another run."""
        leaving = self.leaving(changes)
        applied = await self._apply(changes)
        if self.serves:
            self._events.cut(out_of(self.run, leaving, self._desired.roster.off))
        return applied

    async def _apply(self, changes: list[Change]) -> Applied:
        run = self.run
        refused, left = await self._ask(changes)
        if stale := [Change(tag, key, None) for tag, key, packed in left if packed and self._has(tag, key)]:
            # The new credential waits for another run, but the old one is removed now.
            refused = refused + (await self._ask(stale)).refused
            changes = changes + stale
        if not refused:
            return Applied([], left)
        if not await self._answers():
            return Applied(refused if run.alive else [], left)
        # A change that timed out may have been applied.
        await self._audit()
        if kept := self.kept(changes, left):
            refused = refused + (await self._ask(kept)).refused
        if not self.is_asked:
            return Applied([], [])
        if kept := self.kept(changes, left):
            names = sorted({change.key for change in kept})
            text = "the core still lets in {count} removed users: the node replaces it by a new core. Users: {users}"
            self.log.error(text, count=len(names), users=", ".join(names[:LISTED]))
        differ = {change.key for change in changes if self._packed(change) != change.packed}
        differ -= {change.key for change in kept}
        refused = [refusal for refusal in dict.fromkeys(refused) if key_of(refusal.email) in differ]
        # A change of the same pair that is left already brings the new account, without the old one.
        later = {(change.tag, change.key) for change in left}
        return Applied(refused, left + [change for change in kept if (change.tag, change.key) not in later])

    def coming(self, touched: Iterable[tuple[str, str]]) -> list[Change]:
        """The additions among the changes that these pairs need."""
        return [change for change in self.changes(touched) if change.packed is not None]

    def leaving(self, changes: Iterable[Change]) -> list[str]:
        """The keys of users that these changes remove from an inbound."""
        return list(dict.fromkeys(change.key for change in changes if change.packed is None and self._packed(change)))

    def kept(self, changes: Iterable[Change], left: Iterable[Change] = ()) -> list[Change]:
        """Removals and replacements, except those in `left`, whose old account is still in force."""
        later = set(left)
        have = [(self._packed(change), change) for change in changes if change not in later]
        return [change for packed, change in have if packed is not None and packed != change.packed]

    def _packed(self, change: Change) -> bytes | None:
        return self.run.accounts.get(change.tag, {}).get(change.key)

    def _has(self, tag: str, key: str) -> bool:
        return key in self.run.accounts.get(tag, {})

    async def _ask(self, changes: list[Change]) -> Applied:
        if not self.is_asked:
            return Applied([], [])
        try:
            return await self.run.apply(changes)
        except Exception:
            # The change may or may not have been applied.
            if self.run.alive:
                await self._answers()
            if not self.is_asked:
                return Applied([], [])
            raise

    async def _answers(self) -> bool:
        """Whether the run answers after something went wrong. If it lives and does not, check it at once."""
        run = self.run
        answers = await lives(run, self._reactor)
        if not answers and run.alive:
            self._watch.doubt(run)
        return answers

    async def _audit(self) -> None:
        try:
            await self.run.audit()
        except NodeError as error:
            self.log.warn(
                "the core's users could not be audited: {reason}; the next audit tries again", reason=error.text
            )


class Keepers(Worker, Follower):
    """Has a keeper for each run from before its first connection until it ends; iterates over those that serve."""

    def __init__(self, context: Context, watch: Watch) -> None:
        super().__init__(context)
        self._common = context
        self._watch = watch
        self._keepers: dict[Generation, Keeper] = {}
        self._generations.follow(self)

    def __iter__(self) -> Iterator[Keeper]:
        return iter([self._keepers[run] for run in self._generations.serving])

    def of(self, run: Generation | None) -> Keeper | None:
        """The keeper of a run; None if it does not serve."""
        return self._keepers.get(run) if run is not None else None

    def expect(self, run: Generation, accepted: Accepted) -> None:
        """Note the backend of a run that joins next, if it is not the one accepted now."""
        self._keepers[run] = Keeper(self._common, run, accepted, self._watch)

    def accept(self, run: Generation | None, accepted: Accepted | None) -> None:
        """Note the backend that is accepted while this run serves."""
        if (keeper := self.of(run)) is not None and accepted is not None:
            keeper.accepted = accepted

    def joined(self, run: Generation) -> None:
        if run not in self._keepers:
            assert self._desired.accepted is not None
            self.expect(run, self._desired.accepted)

    def left(self, run: Generation) -> None:
        del self._keepers[run]


def out_of(run: Generation, leaving: Iterable[str], off: Collection[str]) -> list[str]:
    """Select the users who are in no inbound of the run any more, except users who are off by a limit."""
    there = run.accounts.values()
    return [key for key in leaving if key not in off and not any(key in accounts for accounts in there)]
