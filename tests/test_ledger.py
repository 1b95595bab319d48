"""Traffic accounting: no byte is lost or booked twice, whatever runs come, go and start again."""

from __future__ import annotations

from collections import Counter as Tally

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from node.ledger import DIRECTIONS, Counter, Ledger, Scope
from node.users import key_of

UP, DOWN = DIRECTIONS
ANN_UP, ANN_DOWN = Counter(Scope.USER, "ann", UP), Counter(Scope.USER, "ann", DOWN)

counters = st.builds(
    Counter, st.sampled_from(Scope), st.sampled_from(["ann", "Ann", "bob", "İ"]), st.sampled_from(DIRECTIONS)
)
steps = st.dictionaries(counters, st.integers(0, 1000), max_size=6)


def booked(counter: Counter) -> Counter:
    """Where the bytes of a counter belong."""
    return counter._replace(name=key_of(counter.name)) if counter.scope is Scope.USER else counter


class Accounting(RuleBasedStateMachine):
    """Several runs count, are read, begin again and end; rows are taken at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.runs: dict[int, dict[Counter, int]] = {}
        self.seen: Tally[Counter] = Tally()
        self.delivered: Tally[Counter] = Tally()

    @rule(run=st.integers(0, 2), step=steps)
    def count_and_read(self, run: int, step: dict[Counter, int]) -> None:
        cumulative = self.runs.setdefault(run, {})
        for counter, more in step.items():
            cumulative[counter] = cumulative.get(counter, 0) + more
            self.seen[booked(counter)] += more
        self.ledger.book(run, dict(cumulative))

    @rule(run=st.integers(0, 2))
    def end_and_begin_anew(self, run: int) -> None:
        self.runs.pop(run, None)
        self.ledger.keep(self.runs)

    @rule(scope=st.sampled_from(Scope))
    def take_all(self, scope: Scope) -> None:
        self._take(self.ledger.all(scope))

    @rule(counter=counters)
    def take_one(self, counter: Counter) -> None:
        self._take(self.ledger.one(counter.scope, counter.name) or [])

    def _take(self, rows: list[tuple[Counter, int]]) -> None:
        for counter, value in rows:
            self.delivered[counter] += value
        self.ledger.take(counter for counter, _ in rows)

    @invariant()
    def nothing_is_lost(self) -> None:
        pending = Tally({counter: value for scope in Scope for counter, value in self.ledger.all(scope)})
        assert +(self.delivered + pending) == +self.seen

    @invariant()
    def rows_are_whole(self) -> None:
        assert all(value > 0 for _, value in self.ledger.all(Scope.USER))
        for scope in (Scope.INBOUND, Scope.OUTBOUND):
            names = {counter.name for counter in self.seen if counter.scope is scope}
            listed = [(counter.name, counter.direction) for counter, _ in self.ledger.all(scope)]
            assert sorted(listed) == sorted((name, direction) for name in names for direction in DIRECTIONS)


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_run_that_was_not_kept_begins_anew() -> None:
    """A run that ended is forgotten: were its name used again, it would count from zero."""
    ledger = Ledger()
    for reading in (100, 100):
        ledger.book("run", {ANN_UP: reading})
        ledger.book("other", {ANN_DOWN: 7})
        ledger.keep(["other"])
    assert ledger.one(Scope.USER, "ann") == [(ANN_UP, 200), (ANN_DOWN, 7)]


def test_a_counter_that_went_down_counts_from_zero() -> None:
    """A counter that is below its last reading began again: what it says now is new."""
    ledger = Ledger()
    for value in (100, 130, 20, 20, 25):
        ledger.book("run", {ANN_UP: value})
    assert ledger.all(Scope.USER) == [(ANN_UP, 130 + 25)]


def test_runs_are_counted_apart() -> None:
    """Two cores that run at once add up, and a new one begins at zero."""
    ledger = Ledger()
    ledger.book("old", {ANN_UP: 100})
    ledger.book("new", {ANN_UP: 30})
    ledger.book("old", {ANN_UP: 110})
    assert ledger.one(Scope.USER, "ann") == [(ANN_UP, 140), (ANN_DOWN, 0)]


def test_bytes_outlive_their_run() -> None:
    """What was read before a run ended is there until it is taken."""
    ledger = Ledger()
    ledger.book("run", {ANN_UP: 100})
    ledger.keep([])
    assert ledger.all(Scope.USER) == [(ANN_UP, 100)]


def test_a_reading_without_a_counter_forgets_nothing() -> None:
    """A counter that is missing once is compared with its last value when it is back."""
    ledger = Ledger()
    for reading in ({ANN_UP: 100}, {}, {ANN_UP: 110}):
        ledger.book("run", reading)
    assert ledger.all(Scope.USER) == [(ANN_UP, 110)]


def test_only_what_is_named_is_taken() -> None:
    """Taking one row leaves the others, and a name that was never counted is no error."""
    ledger = Ledger()
    ledger.book("run", {ANN_UP: 1, ANN_DOWN: 2})
    ledger.take([ANN_UP, Counter(Scope.USER, "nobody", UP)])
    assert ledger.all(Scope.USER) == [(ANN_DOWN, 2)]


@pytest.mark.parametrize("asked", ["ann", "ANN"])
def test_a_user_is_found_in_any_spelling(asked: str) -> None:
    """A user's rows are found by his name in any case; inbounds are found by their exact tag only."""
    ledger = Ledger()
    ledger.book("run", {Counter(Scope.USER, "Ann", UP): 5, Counter(Scope.INBOUND, "ann", UP): 1})
    rows = ledger.one(Scope.USER, asked)
    assert rows == [(ANN_UP, 5), (ANN_DOWN, 0)]
    assert ledger.spelled(rows[0][0]) == "Ann"
    assert (ledger.one(Scope.INBOUND, asked) is None) == (asked == "ANN")


def test_a_name_that_was_never_counted() -> None:
    """Nothing is made up for a name that no core ever counted."""
    ledger = Ledger()
    ledger.book("run", {ANN_UP: 5})
    assert ledger.one(Scope.USER, "bob") is None
    assert ledger.one(Scope.OUTBOUND, "ann") is None


def test_a_respelled_user_is_named_as_he_counts_now() -> None:
    """Rows carry the spelling under which a user transfers now, though a counter of an earlier one is still there."""
    ledger = Ledger()
    old, new = Counter(Scope.USER, "Ann", UP), Counter(Scope.USER, "ann", UP)
    ledger.book("run", {old: 5})
    ledger.book("run", {old: 5, new: 7})
    ledger.book("run", {new: 8, old: 5})
    assert [(ledger.spelled(counter), value) for counter, value in ledger.all(Scope.USER)] == [("ann", 13)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_large_counts(values: list[int]) -> None:
    """Counts far above 32 bits are exact."""
    ledger = Ledger()
    for run, value in enumerate(values):
        ledger.book(run, {ANN_UP: value})
    assert ledger.one(Scope.USER, "ann") == [(ANN_UP, sum(values)), (ANN_DOWN, 0)]
