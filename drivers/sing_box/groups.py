"""What sing-box tells of its groups of outbounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protos.service_pb2 import Latency
from protos.sing_box_pb2 import Group, GroupItem

URL_TEST = "urltest"
NOT_MEASURED = (
    f"the configuration measures no outbound: add an outbound of the type `{URL_TEST}` whose `outbounds` names others"
)
_SOURCE = "sing-box-urltest"


def measures(tree: dict[str, Any]) -> bool:
    """Whether a configuration has a group that tests outbounds."""
    return any(outbound.get("type") == URL_TEST for outbound in tree.get("outbounds", []))


def latencies(groups: Iterable[Group]) -> list[Latency]:
    """Of each outbound that a group tests, once. One that failed its last test has no time: the core forgets it."""
    items = {item.tag: item for group in groups if group.type == URL_TEST for item in group.items}
    return [_latency(item) for item in items.values()]


def _latency(item: GroupItem) -> Latency:
    seen = item.url_test_time
    return Latency(
        name=item.tag,
        alive=bool(seen),
        # 0 is for who does not answer: one that takes less than a millisecond takes one.
        delay=max(item.url_test_delay, int(bool(seen))),
        link=item.tag,
        last_seen_time=seen,
        last_try_time=seen,
        source=_SOURCE,
    )
