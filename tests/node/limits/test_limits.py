"""Merging a user's own limits with the defaults."""

from __future__ import annotations

from node.limits.limits import NONE, Limit, Way
from node.limits.periods import Period
from protos import service_pb2
from protos.service_pb2 import Limits, Quota, Speed


def test_without_layers_there_are_no_limits() -> None:
    assert Limit.of(()) == Limit.of([Limits(), Limits()]) == NONE
    assert not NONE.any


def test_each_limit_comes_from_the_first_layer_that_has_it() -> None:
    own = Limits(addresses=2, speed=Speed(down=1_000_000))
    inbound = Limits(addresses=9, addresses_action=service_pb2.TELL, expires_at=7, expires_action=service_pb2.TELL)
    everybody = Limits(bytes=Quota(bytes=5, way=Quota.DOWN, period=Quota.MONTH, reset_day=3), speed=Speed(up=4))
    assert Limit.of([own, inbound, everybody]) == Limit(
        quota=5,
        way=Way.DOWN,
        period=Period.MONTH,
        reset_day=3,
        expires_at=7,
        expires_tells=True,
        addresses=2,
        down=1_000_000,
    )


def test_zero_overrides_a_default() -> None:
    own = Limits(addresses=0, expires_at=0, bytes=Quota(), speed=Speed())
    default = Limits(addresses=3, expires_at=9, bytes=Quota(bytes=1), speed=Speed(down=1))
    assert not Limit.of([own, default]).any
