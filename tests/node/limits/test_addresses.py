"""Which addresses are disconnected above the limit, in whatever order they come."""

from __future__ import annotations

import ipaddress
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.contract.connections import Address, Live
from node.limits.address_limits import giving_way, silences
from node.limits.options import Grouping

GRACE = 30.0
PLAIN = Grouping()


def packed(text: str) -> Address:
    return ipaddress.ip_address(text).packed


ADDRESSES = [packed(f"10.0.0.{number}") for number in range(8)] + [packed(f"fd00:{number}::1") for number in range(4)]
CONNECTIONS = st.lists(
    st.builds(
        lambda address, silent: Live("ann", address, b"", silent), st.sampled_from(ADDRESSES), st.floats(0, 2 * GRACE)
    ),
    max_size=20,
)
ORDERS = st.permutations(ADDRESSES).flatmap(
    lambda order: st.integers(0, len(order)).map(
        lambda known: {PLAIN.of(address): number for number, address in enumerate(order[:known])}
    )
)
LIMITS = st.integers(0, 6)


@pytest.mark.parametrize(
    ("grouping", "address", "shown"),
    [
        (PLAIN, "10.1.2.3", "10.1.2.3"),
        (PLAIN, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        (Grouping(24, 56), "10.1.2.3", "10.1.2.0/24"),
        (Grouping(9, 56), "10.255.2.3", "10.128.0.0/9"),
        (Grouping(24, 56), "2001:db8:1:2ff::6", "2001:db8:1:200::/56"),
        (Grouping(24, 128), "2001:db8::6", "2001:db8::6"),
    ],
)
def test_addresses_with_the_same_first_bits_are_one(grouping: Grouping, address: str, shown: str) -> None:
    group = grouping.of(packed(address))
    assert grouping.shown(group) == shown
    assert grouping.of(group) == group


def test_an_address_is_as_silent_as_its_least_silent_connection() -> None:
    one, other = packed("fd00:1::1"), packed("fd00:1::2")
    connections = [Live("ann", one, b"", 90), Live("ann", other, b"", 2), Live("ann", one, b"", 40)]
    assert silences(connections, PLAIN) == {packed("fd00:1::"): 2}
    assert silences(connections, Grouping(ipv6=128)) == {one: 40, other: 2}


def test_the_most_silent_address_goes_first_and_otherwise_the_newcomer() -> None:
    order = {b"old": 1, b"older": 0, b"new": 2}
    assert giving_way(2, GRACE, {b"old": 40, b"older": 31, b"new": 0}, order) == {b"old"}
    assert giving_way(2, GRACE, {b"old": 30, b"older": 29, b"new": 0}, order) == {b"new"}
    assert giving_way(1, GRACE, {b"old": 40, b"older": 1, b"new": 0}, order) == {b"old", b"new"}
    assert giving_way(3, GRACE, {b"old": 1, b"older": 1, b"new": 0, b"unheard": 5}, order) == {b"unheard"}


@given(LIMITS, CONNECTIONS, ORDERS)
def test_never_more_addresses_stay_than_the_limit(
    limit: int, connections: list[Live], order: dict[Address, int]
) -> None:
    silent = silences(connections, PLAIN)
    leaving = giving_way(limit, GRACE, silent, order)
    assert leaving <= silent.keys()
    assert len(leaving) == (max(0, len(silent) - limit) if limit else 0)


@given(LIMITS, CONNECTIONS, ORDERS)
def test_an_active_address_is_never_cut_for_a_later_one(
    limit: int, connections: list[Live], order: dict[Address, int]
) -> None:
    silent = silences(connections, PLAIN)
    leaving = giving_way(limit, GRACE, silent, order)
    for group in leaving:
        if silent[group] <= GRACE:
            later = {other for other in silent if order.get(other, 99) > order.get(group, 99)}
            assert later <= leaving
            assert not any(silent[other] > GRACE for other in silent.keys() - leaving)


@given(LIMITS, CONNECTIONS, ORDERS, st.randoms(use_true_random=False))
def test_the_order_in_which_connections_are_seen_does_not_matter(
    limit: int, connections: list[Live], order: dict[Address, int], chance: random.Random
) -> None:
    mixed = chance.sample(connections, len(connections))
    both = [giving_way(limit, GRACE, silences(each, PLAIN), order) for each in (connections, mixed)]
    assert both[0] == both[1]


@given(st.integers(1, 6), CONNECTIONS, ORDERS)
def test_addresses_that_stay_also_stay_in_the_next_check(
    limit: int, connections: list[Live], order: dict[Address, int]
) -> None:
    leaving = giving_way(limit, GRACE, silences(connections, PLAIN), order)
    left = [live for live in connections if PLAIN.of(live.address) not in leaving]
    assert not giving_way(limit, GRACE, silences(left, PLAIN), order)
