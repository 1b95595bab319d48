"""Read outbound latencies from the groups that sing-box reports. Pure."""

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
    """Return the latency of each outbound in a urltest group, once. After a failed test the core reports no time."""
    items = {item.tag: item for group in groups if group.type == URL_TEST for item in group.items}
    return [_latency(item) for item in items.values()]


def _latency(item: GroupItem) -> Latency:
    seen = item.url_test_time
    return Latency(
        name=item.tag,
        alive=bool(seen),
        # 0 means no answer: less than a millisecond is reported as one.
        delay=max(item.url_test_delay, int(bool(seen))),
        link=item.tag,
        last_seen_time=seen,
        last_try_time=seen,
        source=_SOURCE,
    )
