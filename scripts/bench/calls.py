"""Single calls and their effects: rates, times and processor time, next to the other node and the floors."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import grpc

from drivers.xray.api import STATS
from node.api.methods import SERVICE
from protos import xray_pb2
from protos.service_pb2 import Outbounds, StatRequest, StatResponse, User, UsersStat
from scripts.bench import bare
from scripts.bench.arena import Arena, row, starts
from scripts.bench.load import Load, loading
from scripts.bench.results import Row
from scripts.bench.sides import OPTIONS, Protocol, Side, calling, channel, medians, transport
from scripts.bench.stage import Backing, Links, backing
from scripts.bench.users import effects
from scripts.staging.backend import chunks

NAMES: dict[Protocol, str] = {"grpc": "gRPC", "rest": "REST"}
# Calls in one round.
INFOS, UPDATES, STREAM, ALONE = 300, 100, 1_000, 60
CHANGED = 5_000
# Seconds for work that the node does after a call.
_SETTLED = 0.3
# Live connections while half of the users change.
LIVE = 100
# Live connections while users change one by one.
CONNECTED = 2_000, 6_000


@contextmanager
def core_alone(among: Arena, size: int) -> Iterator[tuple[bare.BareCore, Backing]]:
    target = backing(size)
    with bare.BareCore(target.config, target.crowd.users, among.on.directory) as core:
        yield core, target


def start_rows(among: Arena, size: int) -> Iterator[Row]:
    target = backing(size)
    floor = 1000 * sum(bare.starts(target.config, target.crowd.users, among.on.directory, among.rounds))
    found = starts(among, size)
    yield row(f"Start of {size:,}, reply", "ms", found, 0, floor)
    byte = row(f"Start of {size:,}, first byte", "ms", found, 1, floor)
    yield Row(byte.name, byte.unit, byte.ours, byte.peer, byte.core)


def info_rows(among: Arena) -> Iterator[Row]:
    for protocol, name in NAMES.items():
        found = medians(among.sides(protocol), among.rounds, partial(_infos, protocol))
        yield row(f"GetBaseInfo over {name}, p50", "ms", found, 0)
        yield row(f"GetBaseInfo over {name}, CPU", "us", found, 1)


def _infos(protocol: Protocol, side: Side) -> tuple[float, ...]:
    with calling(side, protocol) as call:
        call("GetBaseInfo", b"")
        used = side.used
        p50 = statistics.median(_took(lambda: call("GetBaseInfo", b"")) for _ in range(INFOS))
        return 1e3 * p50, 1e6 * (side.used - used) / INFOS


def update_rows(among: Arena, core: bare.BareCore, target: Backing) -> Iterator[Row]:
    """Changes of single users: one by one over REST, in a stream, and singly until in effect in the core."""
    found = medians(among.sides("rest"), among.rounds, _updates)
    yield row("PUT /user/sync, one by one", "/s", found, 0, _one_by_one(core, target))
    yield row("PUT /user/sync, CPU", "ms", found, 1)
    alone = bare.alter(core.socket, core.calls(target.crowd.change(STREAM)))
    yield row("SyncUser stream", "/s", medians(among.sides("grpc"), among.rounds, _stream), 0, STREAM / alone)
    floor = _effects_alone(core, target)
    found = medians(among.sides("grpc", floor=False), among.rounds, _effects)
    yield row("one user added, to effect", "ms", found, 0, floor[0])
    yield row("one user removed, to effect", "ms", found, 1, floor[1])


def _updates(side: Side, settled: float = 0.0) -> tuple[float, ...]:
    """Updates a second, and processor milliseconds of each; `settled`: seconds after the controller has connected."""
    bodies = [user.SerializeToString() for user in side.backing.crowd.change(UPDATES)]
    with calling(side, "rest") as call:
        call("SyncUser", bodies[0])
        time.sleep(settled)
        used = side.used
        took = _took(lambda: [call("SyncUser", body) for body in bodies])
        return UPDATES / took, 1e3 * (side.used - used) / UPDATES


def connected_rows(among: Arena) -> Iterator[Row]:
    """Processor time of one changed user, by the number of live connections to the core."""
    side, lives = among.ours, among.ours.backing.crowd.live.uuid
    with loading() as load:
        for before, count in pairwise((0, 0, *CONNECTED)):
            load.open([lives] * (count - before), side.backing.ports[0])
            found = medians({"ours": side}, among.rounds, partial(_updates, settled=_SETTLED))
            yield row(f"PUT /user/sync at {count:,} connections, CPU", "ms", found, 1)


def _one_by_one(core: bare.BareCore, target: Backing) -> float:
    calls = [request for row in core.calls(target.crowd.change(UPDATES)) for request in row]
    with grpc.insecure_channel(f"unix:{core.socket}") as link:
        alter = link.unary_unary(bare.ALTER)
        return UPDATES / _took(lambda: [alter(request) for request in calls])


def feed(side: Side, name: str, messages: Sequence[bytes]) -> float:
    """Seconds of a client-streaming call with these messages."""
    with channel(side.target) as link:
        call = link.stream_unary(f"/{SERVICE.full_name}/{name}")
        metadata = tuple(side.headers.items())
        grpc.channel_ready_future(link).result(10)
        return _took(lambda: call(iter(messages), metadata=metadata))


def _stream(side: Side) -> tuple[float, ...]:
    users = side.backing.crowd.change(STREAM)
    return (STREAM / feed(side, "SyncUser", [user.SerializeToString() for user in users]),)


def _newcomers(target: Backing) -> tuple[list[User], list[User]]:
    """New users, and the removals of the same users."""
    fresh = [target.crowd.make(f"{number}.new") for number in range(ALONE)]
    return fresh, [User(email=user.email) for user in fresh]


def _effects(side: Side) -> tuple[float, ...]:
    api, tag = side.api, side.backing.crowd.tags[-1]
    return tuple(
        1e3 * statistics.median(asyncio.run(effects(side.target, side.headers, api, tag, users)))
        for users in _newcomers(side.backing)
    )


def _effects_alone(core: bare.BareCore, target: Backing) -> tuple[float, ...]:
    fresh, gone = _newcomers(target)
    pairs = ((fresh, core.calls(fresh, remove=False)), (gone, core.removals(gone)))
    tag = target.crowd.tags[-1]
    return tuple(1e3 * statistics.median(bare.effects(core.socket, tag, users, calls)) for users, calls in pairs)


def chunk_rows(among: Arena, core: bare.BareCore, target: Backing) -> Iterator[Row]:
    alone = 1e3 * bare.alter(core.socket, core.calls(target.crowd.change(CHANGED)))
    found = medians(among.sides("grpc"), max(2, among.rounds - 1), lambda side: _chunked(among, side))
    name = "SyncUsersChunked, 5,000 of 10,000"
    yield row(name, "ms", found, 0, alone)
    drops = row("SyncUsersChunked, dropped", "", found, 1)
    yield Row(drops.name, drops.unit, drops.ours, drops.peer)


def _chunked(among: Arena, side: Side) -> tuple[float, ...]:
    messages = [chunk.SerializeToString() for chunk in chunks(side.backing.crowd.change(CHANGED))]
    if side.core is None:
        return 1e3 * feed(side, "SyncUsersChunked", messages), 0
    with among.on.client(side.backing) as proxy, Links(proxy, among.on.echo, LIVE) as links:
        return 1e3 * feed(side, "SyncUsersChunked", messages), links.drops()


def stats_rows(among: Arena) -> Iterator[Row]:
    """GetStats after a tenth of the users, with two rows each, have moved bytes; each node's core for comparison."""
    found = {}
    with loading() as load:
        for protocol, side in among.nodes():
            load.open([user.proxies.vless.id for user in _active(side)], side.backing.ports[0])
            for way in NAMES if side is among.ours else (protocol,):
                found[side.name, way] = _stats(among, side, way, load), _outbounds(among, side, way)
            load.close()
    for way, name in NAMES.items():
        (ours, few), (peer, peer_few) = found["ours", way], found.get(("peer", way), ((None,), None))
        label = f"GetStats over {name}, {2 * len(_active(among.ours)):,} rows"
        yield Row(label, "ms", ours[0], peer[0], ours[1], ours[2])
        yield Row(f"GetStats over {name}, outbounds only", "ms", few, peer_few)


def _active(side: Side) -> Sequence[User]:
    return side.backing.crowd.users[: len(side.backing.crowd.users) // 10]


def _stats(among: Arena, side: Side, protocol: Protocol, load: Load) -> tuple[float, float, float]:
    """Milliseconds of GetStats with reset, of the core's QueryStats, and of a bare transport with the same reply."""
    request, rows = StatRequest(type=UsersStat, reset=True).SerializeToString(), 2 * len(_active(side))
    query = xray_pb2.QueryStatsRequest(pattern="user>>>").SerializeToString()
    asked, alone, reply = [], [], b""
    with calling(side, protocol) as call, grpc.insecure_channel(side.api, OPTIONS) as core:
        ask = core.unary_unary(STATS + "QueryStats")
        for _ in range(among.rounds + 2):
            load.move()
            time.sleep(_SETTLED)
            asked.append(_took(lambda: call("GetStats", request)))
            load.move()
            time.sleep(_SETTLED)
            alone.append(_took(lambda: ask(query)))
        reply = call("GetStats", request)
        found = len(StatResponse.FromString(reply).stats)
        assert found >= rows, f"GetStats returned {found} rows, expected {rows}"
    with transport(protocol, {"GetStats": reply}) as floor, calling(floor, protocol) as call:
        bare_ones = [_took(lambda: call("GetStats", request)) for _ in range(among.rounds + 2)]
    asked_ms, alone_ms, bare_ms = (1e3 * statistics.median(times) for times in (asked, alone, bare_ones))
    return asked_ms, alone_ms, bare_ms


def _outbounds(among: Arena, side: Side, protocol: Protocol) -> float:
    """Milliseconds of GetStats for outbounds, while the core also counts many users."""
    request = StatRequest(type=Outbounds).SerializeToString()
    with calling(side, protocol) as call:
        call("GetStats", request)
        return 1e3 * statistics.median(_took(lambda: call("GetStats", request)) for _ in range(10 * among.rounds))


def _took(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
