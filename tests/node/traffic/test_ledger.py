"""Traffic accounting: no byte is lost or delivered twice, whatever runs start and end, and whatever replies fail."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from node.contract.accounts import key_of
from node.contract.counters import DELIVERED, DIRECTIONS, SEPARATOR, Row, Scope, counter_name
from node.traffic.ledger import Counted, Ledger, SetAside, differences
from tests.harness.ledgers import pending as pending_rows
from tests.harness.ledgers import put_aside

UP, DOWN = DIRECTIONS
USER = Scope.USER
ANN_UP, ANN_DOWN = counter_name(USER, "ann", UP), counter_name(USER, "ann", DOWN)

# A name and a direction of traffic: what a counter counts.
Place = tuple[Scope, str, str]
NAMES = ("ann", "Ann", "bob", "İ")
rows = st.tuples(st.sampled_from(DELIVERED), st.sampled_from(NAMES), st.sampled_from(DIRECTIONS))
by_inbound = st.builds(
    lambda name, tag, way: (Scope.USER_INBOUND, f"{name}{SEPARATOR}{tag}", way),
    st.sampled_from(NAMES),
    st.sampled_from(["in", "In"]),
    st.sampled_from(DIRECTIONS),
)
places = rows | by_inbound
steps = st.dictionaries(places, st.integers(0, 1000), max_size=6)


def booked(place: Place) -> Place:
    """The key to which a counter's bytes belong."""
    scope, name, direction = place
    if scope is Scope.USER_INBOUND:
        return (USER, key_of(name.partition(SEPARATOR)[0]), direction)
    return (scope, key_of(name) if scope is USER else name, direction)


def bytes_of(rows: Iterable[Row]) -> Tally[Place]:
    return Tally(
        {
            (row.scope, row.key, direction): value
            for row in rows
            for direction, value in zip(DIRECTIONS, row.both, strict=True)
        }
    )


class Accounting(RuleBasedStateMachine):
    """Runs count, are read, restart and end; rows are taken any time; replies are delivered or not; nodes restart."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.runs: dict[int, dict[Place, int]] = {}
        self.seen: Tally[Place] = Tally()
        self.delivered: Tally[Place] = Tally()
        self.replies: list[SetAside] = []
        # What a store that got every change has.
        self.stored: dict[tuple[Scope, str], Row] = {}

    @rule(run=st.integers(0, 2), step=steps)
    def count_and_read(self, run: int, step: dict[Place, int]) -> None:
        cumulative = self.runs.setdefault(run, {})
        for place, more in step.items():
            cumulative[place] = cumulative.get(place, 0) + more
            self.seen[booked(place)] += more
        self.ledger.book(run, {counter_name(*place): value for place, value in cumulative.items()})

    @rule(run=st.integers(0, 2))
    def end_and_restart(self, run: int) -> None:
        self.runs.pop(run, None)
        self.ledger.keep(self.runs)

    @rule(scope=st.sampled_from(DELIVERED))
    def take_all(self, scope: Scope) -> None:
        self.replies.append(self.ledger.take(scope))

    @rule(place=rows)
    def take_one(self, place: Place) -> None:
        self.replies.append(self.ledger.take(place[0], place[1]))

    @rule(number=st.integers(0, 3), delivered=st.booleans())
    def a_reply_ends(self, number: int, delivered: bool) -> None:
        if number < len(self.replies):
            taken = self.replies.pop(number)
            self.ledger.settle(taken, delivered)
            self.delivered += bytes_of(put_aside(taken)) if delivered else Tally()

    @rule()
    def the_store_gets_every_change(self) -> None:
        """Applying every change in order gives the ledger's content."""
        self._store()
        assert set(self.stored.values()) == set(self.ledger.everything())

    @rule()
    def the_node_starts_again(self) -> None:
        """In order: the store gets everything, and replies under way are not delivered."""
        self._store()
        self.replies, self.runs = [], {}
        self.ledger = Ledger()
        self.ledger.restore(self.stored.values())

    @rule(most=st.integers(1, 3))
    def the_store_gets_some_changes(self, most: int) -> None:
        rows = self.ledger.changes(most)
        assert len(rows) <= most
        self._note(rows)

    def _store(self) -> None:
        self._note(self.ledger.changes())

    def _note(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.stored.pop((row.scope, row.key), None)
            if any(row.both):
                self.stored[row.scope, row.key] = row

    @invariant()
    def nothing_is_lost(self) -> None:
        pending = bytes_of([row for scope in DELIVERED for row in pending_rows(self.ledger, scope)])
        aside = sum((bytes_of(put_aside(taken)) for taken in self.replies), Tally())
        assert +(self.delivered + aside + pending) == +self.seen

    @invariant()
    def rows_are_whole(self) -> None:
        assert all(any(row.both) for row in pending_rows(self.ledger, USER))
        for scope in (Scope.INBOUND, Scope.OUTBOUND):
            running = {name for run in self.runs.values() for place, name, _ in run if place is scope}
            listed = {row.name for row in pending_rows(self.ledger, scope)}
            assert running <= listed
            # A name that is gone has no row once its bytes are delivered.
            known = {name for name in NAMES if self.ledger.one(scope, name)}
            assert (
                known - {name for taken in self.replies if taken.scope is scope for name in taken.sums.names} <= listed
            )


Accounting.TestCase.settings = settings(max_examples=3 * settings().max_examples, stateful_step_count=30)
TestAccounting = Accounting.TestCase


@given(
    st.dictionaries(st.text(max_size=20), st.integers(0, 9)), st.dictionaries(st.text(max_size=20), st.integers(0, 9))
)
def test_counters_of_something_else(before: dict[str, int], after: dict[str, int]) -> None:
    """A core may have other counters than traffic, of any name."""
    last: dict[str, Counted] = {}
    assert not differences(last, before.items())
    assert not differences(last, after.items())


def test_a_run_that_was_not_kept_counts_from_zero() -> None:
    """A run that ended is forgotten: if its name is used again, it counts from zero."""
    ledger = Ledger()
    for reading in (100, 100):
        ledger.book("run", {ANN_UP: reading})
        ledger.book("other", {ANN_DOWN: 7})
        ledger.keep(["other"])
    assert ledger.one(USER, "ann") == Row(USER, "ann", 200, 7)


def test_a_counter_that_went_down_counts_from_zero() -> None:
    """A counter that is below its last reading was reset: its value is new."""
    ledger = Ledger()
    for value in (100, 130, 20, 20, 25):
        ledger.book("run", {ANN_UP: value})
    assert pending_rows(ledger, USER) == [Row(USER, "ann", 130 + 25, 0)]


def test_runs_are_counted_apart() -> None:
    """Two cores that run at once add up, and a new one begins at zero."""
    ledger = Ledger()
    ledger.book("old", {ANN_UP: 100})
    ledger.book("new", {ANN_UP: 30})
    ledger.book("old", {ANN_UP: 110})
    assert ledger.one(USER, "ann") == Row(USER, "ann", 140, 0)


def test_bytes_outlive_their_run() -> None:
    """Bytes read before a run ended stay until they are delivered."""
    ledger = Ledger()
    ledger.book("run", {ANN_UP: 100, counter_name(Scope.INBOUND, "in", UP): 5})
    ledger.keep([])
    assert pending_rows(ledger, USER) == [Row(USER, "ann", 100, 0)]
    assert pending_rows(ledger, Scope.INBOUND) == [Row(Scope.INBOUND, "in", 5, 0)]


def test_a_reading_without_a_counter_forgets_nothing() -> None:
    """A counter that is missing once is compared with its last value when it is back."""
    ledger = Ledger()
    for reading in ({ANN_UP: 100}, {}, {ANN_UP: 110}):
        ledger.book("run", reading)
    assert pending_rows(ledger, USER) == [Row(USER, "ann", 110, 0)]


def test_whether_anything_moved() -> None:
    """`book` tells an idle core from a counting one: only zeros mean no traffic."""
    ledger = Ledger()
    inbound = counter_name(Scope.INBOUND, "in", UP)
    readings = ({inbound: 0}, {inbound: 0, ANN_UP: 1}, {inbound: 0, ANN_UP: 1}, {inbound: 2, ANN_UP: 1})
    booked = [ledger.book("run", reading) for reading in readings]
    assert [any(sums.moved for sums in found.values()) for found in booked] == [False, True, False, True]


def test_inbounds_that_run_are_listed_with_zero() -> None:
    """An inbound without traffic is listed while its core runs; one that is gone, until its bytes are delivered."""
    ledger = Ledger()
    quiet, busy = (counter_name(Scope.INBOUND, name, DOWN) for name in ("quiet", "busy"))
    ledger.book("run", {quiet: 0, busy: 9})
    listed = [Row(Scope.INBOUND, "quiet", 0, 0), Row(Scope.INBOUND, "busy", 0, 9)]
    assert pending_rows(ledger, Scope.INBOUND) == listed
    ledger.keep([])
    assert pending_rows(ledger, Scope.INBOUND) == listed[1:]
    ledger.settle(ledger.take(Scope.INBOUND), delivered=True)
    assert pending_rows(ledger, Scope.INBOUND) == []


def test_rows_do_not_pile_up() -> None:
    """Inbounds that come and go leave nothing behind once their bytes are delivered, nor do users without bytes."""
    ledger = Ledger()
    for number in range(100):
        inbound, user = counter_name(Scope.INBOUND, f"in {number}", UP), counter_name(USER, f"{number}", UP)
        ledger.keep([number])
        ledger.book(number, {inbound: number % 2, user: 0})
        ledger.settle(ledger.take(Scope.INBOUND), delivered=True)
    ledger.keep([])
    assert {scope: len(rows) for scope, rows in ledger._pending.items()} == dict.fromkeys(DELIVERED, 0)


def test_a_lost_reply_comes_back() -> None:
    """Rows of a reply that was not delivered are added to what was counted since."""
    ledger = Ledger()
    ledger.book("run", {ANN_UP: 10})
    taken = ledger.take(USER)
    assert pending_rows(ledger, USER) == []
    ledger.book("run", {ANN_UP: 15, ANN_DOWN: 1})
    ledger.settle(taken, delivered=False)
    assert pending_rows(ledger, USER) == [Row(USER, "ann", 15, 1)]


def test_what_is_aside_is_still_ours() -> None:
    """A node that is killed before a reply is delivered has its rows afterwards; after delivery they are gone."""
    ledger = Ledger()
    ledger.book("run", {ANN_UP: 10})
    taken = ledger.take(USER)
    assert ledger.changes() == [Row(USER, "ann", 10, 0)] == ledger.everything()[0:1]
    ledger.settle(taken, delivered=True)
    assert ledger.changes() == [Row(USER, "ann", 0, 0)]
    assert (ledger.changes(), ledger.everything()) == ([], [])


def test_only_what_is_named_is_taken() -> None:
    """Taking one row leaves the others, and a name without bytes is no error."""
    ledger = Ledger()
    ledger.book("run", {ANN_UP: 1, counter_name(USER, "bob", UP): 2})
    assert put_aside(ledger.take(USER, "Ann")) == [Row(USER, "ann", 1, 0)]
    assert put_aside(ledger.take(USER, "nobody")) == []
    assert pending_rows(ledger, USER) == [Row(USER, "bob", 2, 0)]


@pytest.mark.parametrize("asked", ["ann", "ANN"])
def test_a_user_is_found_in_any_spelling(asked: str) -> None:
    """A user's row is found by their name in any case; inbounds are found by their exact tag only."""
    ledger = Ledger()
    ledger.book("run", {counter_name(USER, "Ann", UP): 5, counter_name(Scope.INBOUND, "ann", UP): 1})
    assert ledger.one(USER, asked) == Row(USER, "Ann", 5, 0)
    assert (ledger.one(Scope.INBOUND, asked) is None) == (asked == "ANN")


def test_a_name_that_was_never_counted() -> None:
    """A name that no core ever counted has no row."""
    ledger = Ledger()
    ledger.book("run", {ANN_UP: 5})
    assert ledger.one(USER, "bob") is None
    assert ledger.one(Scope.OUTBOUND, "ann") is None


def test_a_respelled_user_is_named_as_he_counts_now() -> None:
    """Rows have the spelling of a user's name that was counted last, even if a counter of an older one still exists."""
    ledger = Ledger()
    old, new = counter_name(USER, "Ann", UP), counter_name(USER, "ann", UP)
    ledger.book("run", {old: 5})
    ledger.book("run", {old: 5, new: 7})
    ledger.book("run", {new: 8, old: 5})
    assert pending_rows(ledger, USER) == [Row(USER, "ann", 13, 0)]


@pytest.mark.parametrize(("scope", "more"), [(USER, ""), (Scope.USER_INBOUND, f"{SEPARATOR}in")])
def test_counters_of_a_user_in_any_spelling_are_saved(scope: Scope, more: str) -> None:
    """A killed node has the counters that its rows include, also of bytes delivered before they were saved."""
    ledger = Ledger()
    old, new = f"{scope.value}>>>Ann{more}", f"{scope.value}>>>ann{more}"
    ledger.book("run", {f"{old}>>>traffic>>>uplink": 5})
    ledger.settle(ledger.take(USER), delivered=True)
    assert ledger.counted("run", ledger.changes()) == {old: (5, None)}
    ledger.book("run", {f"{old}>>>traffic>>>uplink": 6, f"{new}>>>traffic>>>uplink": 7})
    assert ledger.counted("run", ledger.changes()) == {old: (6, None), new: (7, None)}


def test_inbounds_of_earlier_runs_cost_nothing() -> None:
    """A controller may invent tags without end: what a run has not counted is not looked for."""

    class Looked(dict[str, Counted]):
        looks = 0

        def get(self, name: str, default: object = None) -> Counted | None:  # type: ignore[override]
            self.looks += 1
            return super().get(name)

    ledger, later = Ledger(), Looked()
    for run in range(100):
        ledger.book(run, {counter_name(Scope.USER_INBOUND, f"ann{SEPARATOR}{run}", UP): 1})
    ledger.keep([])
    ledger.changes()
    ledger._last["later"] = later
    ledger.book("later", {counter_name(Scope.USER_INBOUND, f"ann{SEPARATOR}in", UP): 1})
    later.looks = 0
    assert ledger.counted("later", ledger.changes()) == {f"user_inbound>>>ann{SEPARATOR}in": (1, None)}
    assert later.looks <= 2


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**60), min_size=1, max_size=5))
def test_large_counts(values: list[int]) -> None:
    """Counts far above 32 bits are exact."""
    ledger = Ledger()
    for run, value in enumerate(values):
        ledger.book(run, {ANN_UP: value})
    assert (ledger.one(USER, "ann") or Row(USER, "ann", 0, 0)).uplink == sum(values)


def test_users_by_inbound() -> None:
    """Their bytes are the user's, in any spelling, and have totals of their own, which no reset changes."""
    ledger, later = Ledger(), Ledger()
    for run, value in (("one", 5), ("one", 7), ("two", 100)):
        names = (f"Ann{SEPARATOR}In", f"bob{SEPARATOR}in", f"Ann{SEPARATOR}other")
        moved = ledger.book(run, {counter_name(Scope.USER_INBOUND, name, UP): value for name in names})
    assert moved[Scope.USER_INBOUND].up == {
        f"ann{SEPARATOR}In": 100,
        f"bob{SEPARATOR}in": 100,
        f"ann{SEPARATOR}other": 100,
    }
    assert moved[USER].up == {"ann": 200, "bob": 100}
    assert [*ledger.sizes] == [*DELIVERED]
    taken = ledger.take(USER)
    rows = [Row(USER, "Ann", 14, 0), Row(USER, "bob", 7, 0)]
    assert {*ledger.counted("one", rows)} == {f"user_inbound>>>{name}" for name in names}
    ledger.settle(taken, delivered=True)
    later.restore_totals(ledger.totals.everything())
    for each in (ledger, later):
        assert each.by_inbound("ann") == [("In", (107, 0)), ("other", (107, 0))]
        assert each.by_inbound("cora") == []


def test_a_user_by_inbound_goes_on_after_a_node() -> None:
    """Counters that an earlier node process has booked are not booked again."""
    ledger, counter = Ledger(), counter_name(Scope.USER_INBOUND, f"ann{SEPARATOR}in", UP)
    ledger.go_on("run", {counter: 100})
    moved = ledger.book("run", {counter: 130})
    assert moved[USER].up == {"ann": 30} and ledger.one(USER, "ann") == Row(USER, "ann", 30, 0)
