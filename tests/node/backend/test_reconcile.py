"""Applying users: one batch at a time, towards the newest target; each caller gets the outcome of its changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from node.backend.reconcile import Pairs, Reconciler
from node.base.errors import CoreFailed
from node.contract.accounts import Accounts, Change, Refusal, apply, diff
from node.contract.driver import Applied

TAGS = ("a", "b")
NOTHING = Applied([], [])


class Core(Reconciler):
    """A running core in small: a batch is in force when the test lets it. `refuse`: keys that it does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.target: dict[str, Accounts] = {tag: {} for tag in TAGS}
        self.accounts: dict[str, Accounts] = {tag: {} for tag in TAGS}
        self.refuse: set[str] = set()
        self.batches: list[list[Change]] = []
        self._going: Deferred[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._going is not None

    def changes(self, touched: Iterable[tuple[str, str]]) -> list[Change]:
        here = [Change(tag, key, self.target[tag].get(key)) for tag, key in touched if tag in self.target]
        return [change for change in here if self.accounts[change.tag].get(change.key) != change.packed]

    async def apply(self, changes: list[Change]) -> Applied:
        """Apply removals and cheap additions; the others are left."""
        left = [change for change in changes if change.packed == b"dear"]
        done = [change for change in changes if change not in left]
        return Applied(await self._work(done) if done else [], left)

    async def _work(self, changes: list[Change]) -> list[Refusal]:
        assert not self.is_busy, "two batches at once"
        self.batches.append(changes)
        self._going = Deferred()
        try:
            await self._going
        finally:
            self._going = None
        self.accounts = apply([change for change in changes if change.key not in self.refuse], self.accounts)
        refused = sorted({change.key for change in changes} & self.refuse)
        return [Refusal(key.upper(), "not him") for key in refused]

    def finish(self, fault: Exception | None = None) -> None:
        """Finish the batch under way, or let it fail."""
        assert self._going is not None
        if fault:
            self._going.errback(fault)
        else:
            self._going.callback(None)

    def wish(self, tag: str, key: str, packed: bytes | None) -> Pairs:
        self.target = apply([Change(tag, key, packed)], self.target)
        return {(tag, key)}


class ReconcilerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.core = Core()
        self.reconciler: Reconciler = self.core

    def wish(self, tag: str, key: str, packed: bytes | None) -> Deferred[Applied]:
        return self.reconciler.settle(self.core.wish(tag, key, packed))

    def test_callers_are_answered_when_it_is_in_force(self) -> None:
        """A change is done when the core has confirmed it, not before."""
        done = self.wish("a", "ann", b"1")
        self.assertNoResult(done)
        self.core.finish()
        self.assertEqual(self.successResultOf(done), NOTHING)
        self.assertEqual(self.core.accounts["a"], {"ann": b"1"})

    def test_what_is_in_force_costs_nothing(self) -> None:
        """Touched users whose account is the same, and unknown inbounds, do not reach the core."""
        self.core.accounts = {"a": {"ann": b"1"}, "b": {}}
        self.assertEqual(self.successResultOf(self.wish("a", "ann", b"1")), NOTHING)
        self.assertEqual(self.successResultOf(self.reconciler.settle({("gone", "ann")})), NOTHING)
        self.assertEqual(self.core.batches, [])

    def test_what_comes_meanwhile_goes_together(self) -> None:
        """Changes during a batch make one next batch, with the newest state of each user."""
        first = self.wish("a", "ann", b"1")
        later = [self.wish("a", "bob", b"1"), self.wish("a", "ann", b"2"), self.wish("a", "bob", b"3")]
        self.core.finish()
        self.successResultOf(first)
        for done in later:
            self.assertNoResult(done)
        self.core.finish()
        for done in later:
            self.successResultOf(done)
        self.assertEqual(self.core.accounts["a"], {"ann": b"2", "bob": b"3"})
        self.assertEqual(len(self.core.batches), 2)

    def test_refusals_go_to_their_callers(self) -> None:
        """Each caller gets the refusals of its own users, by the e-mail in any case, and no others."""
        self.core.refuse = {"bob"}
        first = self.wish("a", "cy", b"1")
        ann, bob = self.wish("a", "ann", b"1"), self.wish("a", "bob", b"1")
        self.core.finish()
        self.core.finish()
        self.assertEqual([self.successResultOf(done) for done in (first, ann)], [NOTHING] * 2)
        self.assertEqual(self.successResultOf(bob), Applied([Refusal("BOB", "not him")], []))

    def test_a_failed_batch_fails_those_in_it(self) -> None:
        """Callers that wait for a batch get its error; the next batch is tried."""
        first = self.wish("a", "ann", b"1")
        second = self.wish("a", "bob", b"1")
        self.core.finish(CoreFailed("it is gone"))
        self.failureResultOf(first, CoreFailed)
        self.core.finish()
        self.assertEqual(self.successResultOf(second), NOTHING)
        self.assertEqual(self.core.accounts["a"], {"bob": b"1"})

    def test_idle_waits_for_all_before_it(self) -> None:
        """Waiting for idleness includes the batch under way and the one that waits for it."""
        self.wish("a", "ann", b"1")
        self.wish("a", "bob", b"1")
        idle = Deferred.fromCoroutine(self.reconciler.idle())
        self.core.finish()
        self.assertNoResult(idle)
        self.core.finish()
        self.successResultOf(idle)

    def test_removals_do_not_wait_for_what_is_left(self) -> None:
        """A caller is answered at once about changes left for a new run; the next batch goes on."""
        self.core.accounts["a"] = self.core.target["a"] = {"ann": b"1"}
        left = Applied([], [Change("a", "bob", b"dear")])
        self.assertEqual(self.successResultOf(self.wish("a", "bob", b"dear")), left)
        gone = self.wish("a", "ann", None)
        self.core.finish()
        self.assertEqual(self.successResultOf(gone), NOTHING)
        self.assertEqual(self.core.batches, [[Change("a", "ann", None)]])

    def test_each_caller_gets_its_own_left_changes(self) -> None:
        """Each caller gets those of the left changes that it touched."""
        ann = self.wish("a", "ann", b"1")
        bob, cy = self.wish("a", "bob", b"dear"), self.wish("a", "cy", b"1")
        self.core.finish()
        self.core.finish()
        self.assertEqual([self.successResultOf(done).left for done in (ann, cy)], [[], []])
        self.assertEqual(self.successResultOf(bob).left, [Change("a", "bob", b"dear")])

    def test_a_caller_that_goes_away_cancels_nothing(self) -> None:
        """A change goes on, and other callers are answered, when a caller stops waiting."""
        gone, stays = self.wish("a", "ann", b"1"), self.reconciler.settle({("a", "ann")})
        gone.addErrback(lambda _: None)
        gone.cancel()
        self.core.finish()
        self.assertEqual(self.successResultOf(stays), NOTHING)
        self.assertEqual(self.core.accounts["a"], {"ann": b"1"})


wishes = st.tuples(st.sampled_from(TAGS), st.sampled_from("xyz"), st.none() | st.binary(min_size=1, max_size=1))


@settings(deadline=None)
@given(st.lists(st.none() | wishes, max_size=30))
def test_in_the_end_the_target_is_in_force(steps: Sequence[tuple[str, str, bytes | None] | None]) -> None:
    """However changes and confirmations interleave, all callers are answered and the core has the target."""
    core = Core()
    reconciler: Reconciler = core
    told: list[Applied] = []
    for step in steps:
        if step is not None:
            reconciler.settle(core.wish(*step)).addCallback(told.append)
        elif core.is_busy:
            core.finish()
    while core.is_busy:
        core.finish()
    assert diff(core.accounts, core.target) == []
    assert told == [NOTHING] * sum(step is not None for step in steps)
