"""Totals: they never decrease, whatever is read, taken, ended and restarted, and they agree with the ledger."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from node.contract.counters import DELIVERED, Row, Scope, counter_name
from node.traffic.ledger import Ledger, SetAside
from node.traffic.sums import Sums
from node.traffic.totals import OTHERS, Totals
from tests.harness.ledgers import pending as pending_rows
from tests.harness.ledgers import put_aside

EVERY = frozenset(Scope)
Place = tuple[Scope, str, str]
places = st.tuples(
    st.sampled_from(DELIVERED), st.sampled_from(["ann", "Ann", "in"]), st.sampled_from(["uplink", "downlink"])
)


def sums(rows: Iterable[Row]) -> Tally[tuple[Scope, str, bool]]:
    found: Tally[tuple[Scope, str, bool]] = Tally()
    for row in rows:
        for down, value in enumerate(row.both):
            found[row.scope, row.key, bool(down)] += value
    return found


class Lasting(RuleBasedStateMachine):
    """A core counts, restarts and is read; controllers take rows; metrics are read; the node is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Totals(EVERY))
        self.run, self.counts = 0, Tally[Place]()
        self.replies: list[SetAside] = []
        self.delivered: Tally[tuple[Scope, str, bool]] = Tally()
        self.reported: Tally[tuple[Scope, str, bool]] = Tally()
        self.rows: dict[tuple[Scope, str], Row] = {}
        self.totals: dict[tuple[Scope, str], Row] = {}

    @rule(place=places, more=st.integers(0, 1000))
    def count(self, place: Place, more: int) -> None:
        self.counts[place] += more

    @rule()
    def read(self) -> None:
        self.ledger.book(self.run, {counter_name(*place): value for place, value in self.counts.items()})

    @rule()
    def core_ends(self) -> None:
        """Bytes that the core had counted and the node had not read are lost to the ledger as well."""
        self.run, self.counts = self.run + 1, Tally()

    @rule(scope=st.sampled_from(DELIVERED))
    def reset(self, scope: Scope) -> None:
        self.replies.append(self.ledger.take(scope))

    @rule(delivered=st.booleans())
    def reply(self, delivered: bool) -> None:
        for taken in self.replies:
            self.ledger.settle(taken, delivered)
            if delivered:
                self.delivered += sums(put_aside(taken))
        self.replies.clear()
        self.save()

    @rule()
    def tell(self) -> None:
        """Report the totals as a page of metrics does: after they are on disk."""
        self.save()
        now = self.shown()
        assert all(now[place] >= value for place, value in self.reported.items())
        self.reported = now

    @rule()
    def node_is_killed(self) -> None:
        """Replies under way are not delivered; unwritten counters are lost."""
        self.replies.clear()
        self.ledger = Ledger(Totals(EVERY))
        self.ledger.restore(self.rows.values())
        self.ledger.totals.restore(self.totals.values())
        self.core_ends()
        now = self.shown()
        assert all(now[place] >= value for place, value in self.reported.items())

    @invariant()
    def they_are_what_the_ledger_saw(self) -> None:
        aside = [row for taken in self.replies for row in put_aside(taken)]
        pending = [row for scope in DELIVERED for row in pending_rows(self.ledger, scope)]
        assert +self.shown() == +(self.delivered + sums(aside) + sums(pending))

    def save(self) -> None:
        self.rows.update({(row.scope, row.key): row for row in self.ledger.changes()})
        self.totals.update({(row.scope, row.key): row for row in self.ledger.totals.changes()})

    def shown(self) -> Tally[tuple[Scope, str, bool]]:
        return sums(row for scope in DELIVERED for row in self.ledger.totals.all(scope))


LastingTests = Lasting.TestCase


def test_only_what_is_asked_for_is_kept() -> None:
    """Totals of users cost memory and disk: they are kept only if an operator wants them."""
    totals = Totals()
    totals.book({Scope.USER: Sums({}, {"ann": 5}), Scope.INBOUND: Sums({"in": 3, "idle": 0})})
    assert totals.all(Scope.USER) == []
    assert totals.all(Scope.INBOUND) == [Row(Scope.INBOUND, "in", 3, 0), Row(Scope.INBOUND, "idle", 0, 0)]
    assert totals.changes() == [Row(Scope.INBOUND, "in", 3, 0)]
    assert totals.changes() == []


def test_names_have_a_bound() -> None:
    """Invented tags do not make more series than this; their bytes are still counted, and no series decreases."""
    totals = Totals(EVERY, dict.fromkeys(Scope, 2))
    for number in range(4):
        totals.book({Scope.USER: Sums({}, {f"u{number}": 10})})
    assert totals.all(Scope.USER)[:2] == [Row(Scope.USER, "u0", 0, 10), Row(Scope.USER, "u1", 0, 10)]
    assert totals.all(Scope.USER)[2:] == [Row(Scope.USER, OTHERS, 0, 20)]
    totals.changes()
    totals.make_room(Scope.USER, lambda name: name == "u1")
    assert totals.all(Scope.USER) == [Row(Scope.USER, "u1", 0, 10), Row(Scope.USER, OTHERS, 0, 20)]
    assert totals.changes() == [Row(Scope.USER, "u0", 0, 0)]


def test_a_full_scope_is_not_looked_through_each_time() -> None:
    """With more users than there is room for, a look at all of them for each part that is saved would take too long."""
    looks: list[str] = []

    def stays(name: str) -> bool:
        looks.append(name)
        return True

    totals = Totals(EVERY, dict.fromkeys(Scope, 1000))
    totals.book({Scope.USER: Sums(dict.fromkeys(map(str, range(1000)), 1))})
    for _ in range(100):
        totals.make_room(Scope.USER, stays)
    assert looks == []
    for number in range(100):
        totals.book({Scope.USER: Sums({f"new{number}": 1})})
        totals.make_room(Scope.USER, stays)
    assert 0 < len(looks) <= 10 * 1000
