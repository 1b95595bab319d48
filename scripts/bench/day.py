"""Processor time of the node and its core for a controller's day: polls, single users, whole lists."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack

from protos.service_pb2 import Outbounds, StatRequest, Users, UsersStat
from scripts.bench.arena import Arena, row
from scripts.bench.calls import NAMES, feed
from scripts.bench.load import loading
from scripts.bench.results import Row
from scripts.bench.sides import Call, Protocol, Side, calling, core_used

# A day has so many portions; each has so many polls, single users, and one list of all users with a few changed.
PORTIONS, POLLS, SINGLE, CHANGED = 5, 12, 100, 20
# Users with traffic in each portion.
ACTIVE = 100
# Seconds for work that the node does after a call.
_SETTLED = 0.3
_POLL = (
    ("GetStats", StatRequest(type=UsersStat, reset=True).SerializeToString()),
    ("GetStats", StatRequest(type=Outbounds, reset=True).SerializeToString()),
    ("GetBackendStats", b""),
    ("GetSystemStats", b""),
)


def day_rows(among: Arena, portions: int = PORTIONS) -> Iterator[Row]:
    """Rows of a day, measured in portions, sides in turn; the mean portion is scaled to a whole day."""
    with ExitStack() as stack:
        load = stack.enter_context(loading())
        for protocol, name in NAMES.items():
            found: dict[str, list[tuple[float, float]]] = {}
            for _ in range(portions):
                for key, side in among.sides(protocol).items():
                    if side.core:
                        active = side.backing.crowd.users[:ACTIVE]
                        load.visit([user.proxies.vless.id for user in active], side.backing.ports[0])
                    with calling(side, protocol) as call:
                        found.setdefault(key, []).append(cost(side, protocol, call))
            days = {key: _day(costs) for key, costs in found.items()}
            yield row(f"a day over {name}, CPU of node", "s", days, 0)
            yield row(f"a day over {name}, CPU of node and core", "s", days, 1)


def _day(costs: list[tuple[float, float]]) -> tuple[float, float]:
    node, core = (PORTIONS * statistics.mean(column) for column in zip(*costs, strict=True))
    return node, node + core


def cost(side: Side, protocol: Protocol, call: Call) -> tuple[float, float]:
    """Processor seconds of the node and of its core for one portion of a day."""
    node, core = side.used, core_used(side)
    for _ in range(POLLS):
        for name, request in _POLL:
            call(name, request)
    users = [user.SerializeToString() for user in side.backing.crowd.change(SINGLE)]
    if protocol == "grpc":
        feed(side, "SyncUser", users)
    else:
        for user in users:
            call("SyncUser", user)
    side.backing.crowd.change(CHANGED)
    call("SyncUsers", Users(users=side.backing.crowd.users).SerializeToString())
    time.sleep(_SETTLED)
    return side.used - node, core_used(side) - core
