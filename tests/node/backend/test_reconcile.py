"""Bringing users into force: one batch at a time, towards the newest target, and everybody is told of his own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import SynchronousTestCase

from node.backend.reconcile import Pairs, Reconciler
from node.contract.accounts import Accounts, Change, Refusal, apply, diff
from node.contract.driver import Applied
from node.errors import CoreFailed

TAGS = ("a", "b")


class Core:
    """A running core in small: a batch is in force when the test says so. `refuse` are keys it will not take."""

    def __init__(self) -> None:
        self.target: dict[str, Accounts] = {tag: {} for tag in TAGS}
        self.accounts: dict[str, Accounts] = {tag: {} for tag in TAGS}
        self.refuse: set[str] = set()
        self.batches: list[list[Change]] = []
        self._under_way: Deferred[None] | None = None

    @property
    def busy(self) -> bool:
        return self._under_way is not None

    def window(self, collected: float) -> float:
        return 0.3 if collected < 0.3 else 0.0

    def changes(self, touched: Iterable[tuple[str, str]]) -> list[Change]:
        here = [Change(tag, key, self.target[tag].get(key)) for tag, key in touched if tag in self.target]
        return [change for change in here if self.accounts[change.tag].get(change.key) != change.packed]

    def differences(self) -> list[Change]:
        return diff(self.accounts, self.target)

    async def apply(self, changes: list[Change]) -> Applied:
        """Removals and what is free; the rest is left for `renew`."""
        left = [change for change in changes if change.packed == b"dear"]
        done = [change for change in changes if change not in left]
        return Applied(await self._work(done) if done else [], left)

    async def renew(self, left: list[Change]) -> list[Refusal]:
        return await self._work(left)

    async def _work(self, changes: list[Change]) -> list[Refusal]:
        assert not self.busy, "two batches at once"
        self.batches.append(changes)
        self._under_way = Deferred()
        try:
            await self._under_way
        finally:
            self._under_way = None
        self.accounts = apply([change for change in changes if change.key not in self.refuse], self.accounts)
        refused = sorted({change.key for change in changes} & self.refuse)
        return [Refusal(key.upper(), "not him") for key in refused]

    def finish(self, fault: Exception | None = None) -> None:
        """The batch under way is done, or fails."""
        assert self._under_way is not None
        if fault:
            self._under_way.errback(fault)
        else:
            self._under_way.callback(None)

    def wish(self, tag: str, key: str, packed: bytes | None) -> Pairs:
        self.target = apply([Change(tag, key, packed)], self.target)
        return {(tag, key)}


class ReconcilerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.core = Core()
        self.reconciler = Reconciler(self.core, no_sleep)

    def wish(self, tag: str, key: str, packed: bytes | None) -> Deferred[list[Refusal]]:
        return self.reconciler.settle(self.core.wish(tag, key, packed))

    def test_who_waits_is_told_when_it_is_in_force(self) -> None:
        """A change is done when the core confirmed it, not before."""
        done = self.wish("a", "ann", b"1")
        self.assertNoResult(done)
        self.core.finish()
        self.assertEqual(self.successResultOf(done), [])
        self.assertEqual(self.core.accounts["a"], {"ann": b"1"})

    def test_what_is_in_force_costs_nothing(self) -> None:
        """Touched users whose account is the same, and inbounds that are not there, do not reach the core."""
        self.core.accounts = {"a": {"ann": b"1"}, "b": {}}
        self.assertEqual(self.successResultOf(self.wish("a", "ann", b"1")), [])
        self.assertEqual(self.successResultOf(self.reconciler.settle({("gone", "ann")})), [])
        self.assertEqual(self.core.batches, [])

    def test_what_comes_meanwhile_goes_together(self) -> None:
        """Changes during a batch make one next batch, with the newest word on each user."""
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

    def test_refusals_go_to_who_asked(self) -> None:
        """Each is told of the users that he touched, by the e-mail in any case, and of no others."""
        self.core.refuse = {"bob"}
        first = self.wish("a", "cy", b"1")
        ann, bob = self.wish("a", "ann", b"1"), self.wish("a", "bob", b"1")
        self.core.finish()
        self.core.finish()
        self.assertEqual([self.successResultOf(done) for done in (first, ann)], [[], []])
        self.assertEqual(self.successResultOf(bob), [Refusal("BOB", "not him")])

    def test_a_failed_batch_fails_those_in_it(self) -> None:
        """Who waits for a batch is told why it failed; the next one is tried."""
        first = self.wish("a", "ann", b"1")
        second = self.wish("a", "bob", b"1")
        self.core.finish(CoreFailed("it is gone"))
        self.failureResultOf(first, CoreFailed)
        self.core.finish()
        self.assertEqual(self.successResultOf(second), [])
        self.assertEqual(self.core.accounts["a"], {"bob": b"1"})

    def test_idle_waits_for_all_before_it(self) -> None:
        """Who waits for idleness waits for the batch under way and the one that waits for it."""
        self.wish("a", "ann", b"1")
        self.wish("a", "bob", b"1")
        idle = Deferred.fromCoroutine(self.reconciler.idle())
        self.core.finish()
        self.assertNoResult(idle)
        self.core.finish()
        self.successResultOf(idle)

    def test_a_caller_that_goes_away_cancels_nothing(self) -> None:
        """A change goes on, and others are told, when one who waits for it does not wait any more."""
        gone, stays = self.wish("a", "ann", b"1"), self.reconciler.settle({("a", "ann")})
        gone.addErrback(lambda _: None)
        gone.cancel()
        self.core.finish()
        self.assertEqual(self.successResultOf(stays), [])
        self.assertEqual(self.core.accounts["a"], {"ann": b"1"})


async def no_sleep(_: float) -> None:
    """Nothing is dear."""
    raise AssertionError


wishes = st.tuples(st.sampled_from(TAGS), st.sampled_from("xyz"), st.none() | st.binary(min_size=1, max_size=1))


@settings(deadline=None)
@given(st.lists(st.none() | wishes, max_size=30))
def test_in_the_end_the_target_is_in_force(steps: Sequence[tuple[str, str, bytes | None] | None]) -> None:
    """However changes and confirmations interleave, all who wait are told and the core has the target."""
    core = Core()
    reconciler = Reconciler(core, no_sleep)
    told: list[list[Refusal]] = []
    for step in steps:
        if step is not None:
            reconciler.settle(core.wish(*step)).addCallback(told.append)
        elif core.busy:
            core.finish()
    while core.busy:
        core.finish()
    assert diff(core.accounts, core.target) == []
    assert told == [[]] * sum(step is not None for step in steps)


class WindowTests(SynchronousTestCase):
    """Where a batch is dear it waits for more."""

    def setUp(self) -> None:
        self.core, self.clock = Core(), Clock()

        async def sleep(seconds: float) -> None:
            await deferLater(self.clock, seconds)

        self.reconciler = Reconciler(self.core, sleep)

    def wish(self, key: str, packed: bytes | None) -> Deferred[list[Refusal]]:
        return self.reconciler.settle(self.core.wish("a", key, packed))

    def test_additions_are_collected(self) -> None:
        """Those of the window are one batch, and all are told at its end."""
        first = self.wish("ann", b"dear")
        self.clock.advance(0.2)
        second = self.wish("bob", b"dear")
        self.assertFalse(self.core.busy)
        self.clock.advance(0.2)
        self.core.finish()
        self.assertEqual([self.successResultOf(first), self.successResultOf(second)], [[], []])
        self.assertEqual([len(batch) for batch in self.core.batches], [2])

    def test_who_is_removed_does_not_stay_meanwhile(self) -> None:
        """Removals go at once; alone they wait for nothing."""
        self.core.accounts["a"] = {"ann": b"1"}
        self.core.target["a"] = {"ann": b"1"}
        done = self.wish("ann", None)
        self.core.finish()
        self.assertEqual(self.successResultOf(done), [])
        self.assertEqual(self.core.batches, [[Change("a", "ann", None)]])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_what_is_free_waits_for_nothing(self) -> None:
        """Alone it is one batch at once; beside others it goes before the window, and they at its end."""
        done = self.wish("ann", b"free")
        self.core.finish()
        self.assertEqual(self.successResultOf(done), [])
        both = self.reconciler.settle(self.core.wish("a", "bob", b"free") | self.core.wish("a", "cy", b"dear"))
        self.core.finish()
        self.assertNoResult(both)
        self.clock.advance(0.3)
        self.core.finish()
        self.assertEqual(self.successResultOf(both), [])
        self.assertEqual([[change.key for change in batch] for batch in self.core.batches], [["ann"], ["bob"], ["cy"]])

    def test_who_is_refused_is_told_to_him(self) -> None:
        """Of what went before the window, too."""
        self.core.refuse = {"bob"}
        both = self.reconciler.settle(self.core.wish("a", "bob", b"free") | self.core.wish("a", "cy", b"dear"))
        self.core.finish()
        self.clock.advance(0.3)
        self.core.finish()
        self.assertEqual(self.successResultOf(both), [Refusal("BOB", "not him")])
