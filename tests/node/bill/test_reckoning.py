"""The difference between carried and counted bytes is explained to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.bill.reckoning import BYTES, OF_USERS, band, explain
from protos.service_pb2 import Bill, BilledBytes

GB = 10**9
billed = st.builds(lambda one, two: BilledBytes(received=one, sent=two), st.integers(0, 2**50), st.integers(0, 2**50))
bills = st.builds(
    lambda users, inbounds, outbounds, interfaces, controllers, transports: Bill(
        users=users,
        inbounds=inbounds,
        outbounds=outbounds,
        interfaces=interfaces,
        controllers=controllers,
        transports=transports,
    ),
    *(billed for _ in range(5)),
    st.lists(st.sampled_from([*OF_USERS, "grpc"])),
)


def both(count: BilledBytes) -> int:
    return count.received + count.sent


@given(bills)
def test_the_sum_is_right(bill: Bill) -> None:
    explain(bill)
    parts = bill.core + bill.headers + bill.others + both(bill.controllers)
    assert both(bill.interfaces) + bill.missing == parts
    assert bill.ratio >= 0 and 2.09 < bill.least < bill.most < 3.7
    assert not (bill.missing and bill.others)
    assert not bill.warnings or bill.missing or bill.others


def of_users(count: int, times: float, controllers: BilledBytes | None = None) -> Bill:
    """A bill of a machine that carried so many times the bytes of its users."""
    some = BilledBytes(received=count // 10, sent=count - count // 10)
    back = BilledBytes(received=some.sent, sent=some.received)
    half = round(count * times / 2)
    carried = BilledBytes(received=half, sent=half)
    bill = Bill(users=some, inbounds=some, outbounds=back, interfaces=carried, transports=["tls"])
    bill.controllers.MergeFrom(controllers or BilledBytes())
    return bill


@pytest.mark.parametrize("times", [2.0, 2.001, 2.09, 2.15, 3.2])
def test_in_the_band(times: float) -> None:
    bill = of_users(100 * GB, times)
    explain(bill)
    assert not bill.warnings and not bill.others and not bill.missing
    assert bill.core == 200 * GB and bill.ratio == pytest.approx(times)
    assert [bill.least, bill.most] == pytest.approx([2.107, 3.29])


def test_above_the_band() -> None:
    """More than headers can be: somebody else's traffic, or bytes that the core did not count."""
    bill = of_users(100 * GB, 3.5)
    explain(bill)
    assert bill.others == pytest.approx(21 * GB)
    [text] = bill.warnings
    assert f"carried {bill.others:,} bytes more than" in text and "other programs" in text


def test_below_the_band() -> None:
    """More was counted than carried."""
    bill = of_users(100 * GB, 1.9)
    explain(bill)
    assert (bill.missing, bill.headers, bill.others) == (10 * GB, 0, 0)
    [text] = bill.warnings
    assert f"counted {bill.missing:,} bytes that the interfaces did not carry" in text


def test_controllers_are_explained() -> None:
    """A panel that reads the traffic of many users often."""
    bill = of_users(GB, 60, controllers=BilledBytes(received=GB, sent=57 * GB))
    explain(bill)
    assert not bill.warnings and bill.ratio == pytest.approx(2)


def test_a_small_difference_needs_no_explanation() -> None:
    for bill in (Bill(), Bill(interfaces=BilledBytes(sent=BYTES)), of_users(BYTES // 2, 0)):
        explain(bill)
        assert not bill.warnings
    bill = of_users(1000 * GB, 1.985)
    explain(bill)
    assert bill.missing > BYTES and not bill.warnings


def test_a_core_that_counts_less() -> None:
    """Without counters of outbounds or inbounds, those of users count twice."""
    for bill in (
        Bill(users=BilledBytes(received=1, sent=9)),
        Bill(inbounds=BilledBytes(received=1, sent=9)),
        Bill(users=BilledBytes(sent=7), inbounds=BilledBytes(sent=8), outbounds=BilledBytes(sent=12)),
    ):
        explain(bill)
        assert bill.core == 20


def test_bands_by_transport() -> None:
    """From the narrowest to all that was measured; a transport that was not measured has the widest one."""
    assert [*band(["tcp"])] == pytest.approx([2.098, 2.48])
    assert [*band(["tcp", "hysteria"])] == pytest.approx([2.098, 2.54])
    for widest in ([], ["grpc"], OF_USERS):
        assert [*band(widest)] == pytest.approx([2.098, 3.65])
