"""Batches changes of users that the current run cannot take while it runs: a new run brings them.

Removals that a run can take do not come here, so that they never wait for a batch or a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from node.backend.backoff import Backoff
from node.backend.context import Context, Worker
from node.backend.drain import Drain
from node.backend.faults import in_background
from node.backend.keeper import Keeper, Keepers, out_of
from node.backend.reconcile import Batches, Pairs, answer, by_user, pairs
from node.backend.renewal import RETRY, Refresh, Renewal, Renewed
from node.base.errors import InvalidConfig, NodeError
from node.base.logs import Logger
from node.base.waiting import Signal, until
from node.contract.accounts import Change, Refusal
from node.contract.driver import Applied, Generation
from protos.service_pb2 import User

# Seconds for which changes are batched before a new run starts for them; the same at most, while the new run would end
# a draining one early; and between two checks whether it still would.
WINDOW = 0.3
CROWDED_WINDOW = 2.0
LOOK = 0.25
AGAIN = "; the node tries again"
# A change is to blame when this many runs in a row crashed on probation with it.
VERDICT = 2

NONE = Applied([], [])


class Pending(Worker, Batches):
    """Batches changes and starts one new run after another for them. `adopt` makes a run the current one."""

    log = Logger()

    def __init__(
        self, context: Context, renewal: Renewal, drain: Drain, keepers: Keepers, adopt: Callable[[Generation], None]
    ) -> None:
        Worker.__init__(self, context)
        Batches.__init__(self)
        self._renewal = renewal
        self._drain = drain
        self._keepers = keepers
        self._adopt = adopt
        self.left_out = LeftOut()
        self.refresh = Refresh(context, drain, self._begin)
        # When the oldest waiting change came.
        self._since = 0.0
        # The newest run, and the changes that came with it.
        self._brought: tuple[Generation | None, Sequence[Change]] = None, ()
        # Pairs to retry: no run came up with them, though no core refused them.
        self._again: Pairs = set()
        self._retrying = Backoff(self._reactor)
        self._work: Deferred[None] | None = None
        self._over = Signal()
        self._over.fire()
        self._paused = False

    def bring(self, touched: Pairs) -> Deferred[Applied]:
        """Have a new run bring these (tag, key) pairs. Fires when they are in force, with the refusals; none are left.

        A core that is starting for a Start, or after a crash, brings them, too.
        """
        self._since = self._since if self._waiting else self._reactor.seconds()
        done = self._add(touched)
        self._begin()
        return done

    @property
    def under_way(self) -> Pairs:
        """The pairs that wait for a new run."""
        return super().under_way | self._again

    def try_again(self, touched: Pairs) -> None:
        """Retry pairs after the current run failed to take them, with backoff."""
        self._again |= touched
        self._retry()

    def busy(self, touched: Pairs) -> bool:
        """Whether some of these pairs wait for a new run."""
        return super().busy(touched) or not touched.isdisjoint(self._again)

    def pause(self, paused: bool) -> None:
        """Start no new run while the node hands over those that there are."""
        self._paused = paused
        self._begin()

    async def cancel(self) -> None:
        """Give up the run that is starting: a Start, a Stop or the previous run comes instead.

        Returns when it is gone, or drains.
        """
        self._retrying.cancel()
        self.refresh.cancel()
        if self._work is not None and not self._renewal.cancelled:
            self._renewal.cancelled = True
            self._work.cancel()
        await self._over.wait()
        waiting, self._waiting, self._dirty, self._again = self._waiting, [], set(), set()
        answer(waiting, NONE)

    def forget(self) -> None:
        """Clear everything: no run is left, and none is to start."""
        self.left_out.forget()
        self._brought = None, ()

    def crashed(self, run: Generation, killed: bool) -> None:
        """Note that a run crashed on probation: the changes that came with it may be to blame."""
        newest, coming = self._brought
        if run is newest and not killed:
            blamed = self.left_out.crashed(coming)
            self.left_out.note(pairs(blamed), self._refusals(blamed, "the core crashes with this user"))

    def _keeper(self) -> Keeper | None:
        """The keeper of the current run, while the backend is running."""
        return self._keepers.of(self._running)

    # The work

    def _begin(self) -> None:
        if self._over.fired and not self._paused and self._is_due:
            self._over, self._renewal.cancelled = Signal(), False
            work = ensureDeferred(self._bring_all())
            self._work = self._work if work.called else work

    @property
    def _is_due(self) -> bool:
        return bool(self._waiting or self._dirty) or self.refresh.due

    async def _bring_all(self) -> None:
        try:
            while self._is_due and not self._paused:
                await self._bring_some()
        except CancelledError:
            self.log.debug("the new core for changed users is cancelled: a Start, a Stop or another core came first")
        finally:
            self._work = None
            # Who cancelled it answers those that wait, unless they are cancelled, too, and a Start went on meanwhile.
            self._over.fire()
            self._begin()

    async def _bring_some(self) -> None:
        try:
            await self._turn.run(self._batch if self._waiting or self._dirty else self._refresh)
        except CancelledError:
            raise
        except Exception:  # noqa: BLE001 - logged; the next batch goes on
            self.log.failure("changes of users could not be applied to the core; the next audit retries")
            # Changes may wait still, if the fault came before their turn: the reactor goes on until the next try.
            await deferLater(self._reactor, LOOK)

    async def _batch(self) -> None:
        await self._collect()
        self._asked, self._dirty = self._dirty, set()
        waiting, self._waiting = self._waiting, []
        try:
            refused = await self._bring(self._asked)
        except CancelledError:
            answer(waiting, NONE)
            raise
        except Exception:  # noqa: BLE001 - every caller that waits gets it
            fault = Failure()
            for _, done in waiting:
                done.errback(fault)
        else:
            self.left_out.note(self._asked, refused)
            answer(waiting, Applied(refused, []))
        finally:
            self._asked = set()

    async def _collect(self) -> None:
        """Wait for more changes that the same run can bring."""
        enough = self._since + WINDOW
        while (left := enough - self._reactor.seconds()) > 0:
            await deferLater(self._reactor, left)
        await until(self._reactor, lambda: not self._drain.full, self._since + CROWDED_WINDOW, LOOK)

    async def _bring(self, touched: Pairs) -> list[Refusal]:
        """Apply the pairs to the current run as far as it takes them; a new run brings the others."""
        keeper = self._keeper()
        if keeper is None:
            return []
        self.left_out.forgive(touched)
        stuck = touched
        try:
            refused, left = await keeper.settle(touched)
            stuck = pairs(left)
            return refused + (await self._renew(keeper, left) if left else [])
        except NodeError as error:
            self._again |= stuck
            coming = keeper.coming(stuck)
            self.left_out.note(stuck, self._refusals(coming, error.text + AGAIN))
            raise
        finally:
            self._retry()

    async def _renew(self, keeper: Keeper, left: Sequence[Change]) -> list[Refusal]:
        self._again -= pairs(left)
        leaving = keeper.leaving(left)
        renewed = await self._renewal.renew(keeper.run, left)
        if renewed.run is not keeper.run:
            self._brought = renewed.run, [each for each in left if each.packed is not None and each not in renewed.out]
            self._adopt(renewed.run)
            self._events.cut(out_of(renewed.run, leaving, self._desired.roster.off))
            await self._level()
        return self._judge(renewed)

    def _judge(self, renewed: Renewed) -> list[Refusal]:
        """Refuse the changes that did not come in; retry them unless the core itself refused them."""
        if renewed.fault is None:
            return []
        if isinstance(renewed.fault, InvalidConfig):
            self.left_out.refuse(renewed.out)
            return self._refusals(renewed.out, renewed.fault.text)
        self._again |= pairs(renewed.out)
        return self._refusals(renewed.out, renewed.fault.text + AGAIN)

    async def _level(self) -> None:
        """Apply what changed while a new run was starting, now that it has taken over."""
        keeper = self._keeper()
        if keeper is None:
            return
        outstanding = pairs(self.left_out.besides(keeper.differences())) - self._again - self._dirty
        if outstanding:
            try:
                _, left = await keeper.settle(outstanding)
            except NodeError as error:
                self._again |= outstanding
                self.log.warn("the new core did not take all users: {reason}" + AGAIN, reason=error.text)
            else:
                self._dirty |= pairs(left)

    async def _refresh(self) -> None:
        self.refresh.due = False
        run = self._running
        if run is not None and self.refresh.wanted:
            fresh = await self._renewal.refresh(run)
            if fresh is not run:
                self._adopt(fresh)
                await self._level()
            # In case the new run did not take over.
            self.refresh.soon(RETRY)
            self._retry()

    # Retries

    def _retry(self) -> None:
        """Schedule the next retry, if any pair needs one, with backoff; the first comes at once."""
        if not self._again:
            self._retrying.renew()
        elif not self._retrying.pending:
            seconds = self._retrying.later(self._begin_again)
            self.log.warn(
                "{count} users are not in the core yet; the node tries again in {seconds:g} s",
                count=len({key for _, key in self._again}),
                seconds=seconds,
            )

    def _begin_again(self) -> None:
        again, self._again = self._again, set()
        in_background(self.bring(again), "changes of users could not be applied to the core; the next audit retries")

    def _refusals(self, changes: Iterable[Change], reason: str) -> list[Refusal]:
        return [Refusal(self._spelled(change.key), f"{change.tag}: {reason}") for change in changes]

    def _spelled(self, key: str) -> str:
        """A user's e-mail in the controller's spelling."""
        packed = self._desired.roster.users.get(key)
        return key if packed is None else User.FromString(packed).email


class LeftOut:
    """Why wanted users are not in the core, and the changes that a core has refused: no new run starts for these."""

    def __init__(self) -> None:
        # By key, why the core did not take the user's last change.
        self.reasons: dict[str, list[str]] = {}
        self._refused: set[Change] = set()
        self._crashes: dict[Change, int] = {}

    def note(self, touched: Pairs, refused: Iterable[Refusal]) -> None:
        """Note that these pairs were applied, except for these refusals."""
        if self.reasons:
            for _, key in touched:
                self.reasons.pop(key, None)
        for key, some in by_user(refused).items():
            self.reasons[key] = [refusal.reason for refusal in some]

    def refuse(self, changes: Iterable[Change]) -> None:
        """Note that a core does not start with these changes."""
        self._refused.update(changes)

    def crashed(self, changes: Iterable[Change]) -> list[Change]:
        """Note that a run with these changes crashed on probation. Returns those that are to blame by now."""
        self._crashes = {change: self._crashes.get(change, 0) + 1 for change in changes}
        blamed = [change for change, times in self._crashes.items() if times >= VERDICT]
        self.refuse(blamed)
        return blamed

    def forgive(self, touched: Pairs) -> None:
        """Forget refusals of these pairs: a controller has sent them again."""
        if self._refused:
            self._refused = {change for change in self._refused if (change.tag, change.key) not in touched}

    def besides(self, changes: Iterable[Change]) -> list[Change]:
        """Of all outstanding changes those that no core has refused; forgets refusals of others."""
        outstanding = list(changes)
        self._refused.intersection_update(outstanding)
        return [change for change in outstanding if change not in self._refused]

    def forget(self) -> None:
        """Clear everything: no core runs any more."""
        self.reasons, self._refused, self._crashes = {}, set(), {}
