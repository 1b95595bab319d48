"""Parsing of limits."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.limits.parsing import by_inbound, limits, moment, speed
from protos import service_pb2
from protos.service_pb2 import Limits, Quota, Speed


def test_all_limits() -> None:
    text = "addresses=3, down=100M up=1.5k bytes=500GB/Month@5 way=down expires=2026-12-31 tell=bytes+expires"
    quota = Quota(bytes=500 * 10**9, way=Quota.DOWN, period=Quota.MONTH, reset_day=5, action=service_pb2.TELL)
    assert limits(text) == Limits(
        bytes=quota,
        expires_at=1_798_675_200,
        expires_action=service_pb2.TELL,
        addresses=3,
        speed=Speed(down=100_000_000, up=1_500),
    )
    assert limits("") == Limits()


def test_by_inbound() -> None:
    words = " free: down=2M bytes=10GB/month ; in:1: addresses=0 expires=2026-12-31T12:00;"
    assert by_inbound(words) == {
        "free": limits("down=2M bytes=10GB/month"),
        "in:1": limits("addresses=0 expires=2026-12-31T12:00"),
    }


@pytest.mark.parametrize(
    "text",
    [
        *(
            "addresses",
            "addresses=",
            "addresses=-1",
            "addresses=٣",
            "devices=3",
            "down=fast",
            "down=1e9",
            "bytes=1GB/year",
        ),
        *("bytes=/month", "bytes=1GB/month@99", "way=sideways", "expires=soon", "tell=speed", "expires=99999999999999"),
    ],
)
def test_invalid_texts(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        limits(text)


def test_an_inbound_without_a_tag() -> None:
    with pytest.raises(ValueError, match="has no tag of an inbound"):
        by_inbound("addresses=3")


@given(st.text(max_size=40))
def test_any_text(text: str) -> None:
    """It is parsed, or raises `ValueError`."""
    for read in (limits, speed, moment, by_inbound):
        with suppress(ValueError):
            read(text)
