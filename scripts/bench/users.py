"""Cost of starting and changing users, with live connections through the core, next to the core alone.

`python -m scripts.bench.users [USERS[xINBOUNDS] ...]` prints a table for each size: medians of a few rounds. `floor` is
the core alone with the same work in the same run: for a Start, conversion of the configuration and the start from the
converted message; for a sync, as many AlterInbound calls from a bare client with 64 in flight.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from node.api.methods import SERVICE
from protos.service_pb2 import Empty, User, Users
from scripts.bench import bare
from scripts.bench.stage import (
    Backing,
    Cost,
    Crowd,
    Links,
    Stage,
    backing,
    machine,
    median,
    percentile,
    stage,
)
from scripts.bench.start import starts
from scripts.staging.target import Target, credentials

SIZES = ("1000", "10000", "50000", "10000x5")
# Users of one stream, and users sent singly, each after the previous one is in effect.
STREAM, ALONE = 2_000, 200


def main(sizes: Iterable[str]) -> None:
    print(machine())
    with stage() as on:
        for size in sizes:
            users, _, inbounds = size.partition("x")
            table(on, backing(int(users), int(inbounds or 1)))
    print(machine())


def table(on: Stage, target: Backing) -> None:
    size, inbounds = len(target.crowd.users), len(target.ports)
    rounds = 5 if size * inbounds <= 10_000 else 3
    print(f"\n{size} users, {inbounds} inbounds, {rounds} rounds")
    print(f"{'':30} {'ms':>7} {'floor':>7} {'node CPU':>9} {'core CPU':>9}  {'drops':>5}")
    with on.client(target) as proxy:
        reply, byte = starts(on, target, proxy, rounds)
        alone = sum(bare.starts(target.elsewhere(), target.crowd.users, on.directory, rounds))
        line("Start, reply", reply, alone)
        line("Start, first byte", byte, alone)
        floor = bare.BareCore(target.elsewhere(), target.crowd.users, on.directory)
        with Links(proxy, on.echo) as links, floor as core:
            syncs(on, target, links, core, rounds)
            streams(on, target, links, core)
    on.controller.stop()


def syncs(on: Stage, target: Backing, links: Links, core: bare.BareCore, rounds: int) -> None:
    crowd, again = target.crowd, target.request()
    same = Users(users=crowd.users)
    identical = [on.measure(lambda: on.controller.start(again)) for _ in range(rounds)]
    line("identical Start", median(identical), 0, links)
    identical = [on.measure(lambda: on.controller.call("SyncUsers", Empty, same)) for _ in range(rounds)]
    line("identical SyncUsers", median(identical), 0, links)
    others = len(crowd.users) - 1
    for name, count, times in (("1 % changed", max(1, others // 100), rounds), ("all changed", others, 1)):
        costs = [on.measure(changed(on, crowd, count)) for _ in range(times)]
        line(name, median(costs), statistics.median(floor(core, crowd, count) for _ in range(times)), links)


def changed(on: Stage, crowd: Crowd, count: int) -> Callable[[], object]:
    """A sync in which so many users have a new id."""
    crowd.change(count)
    request = Users(users=crowd.users)
    return lambda: on.controller.call("SyncUsers", Empty, request)


def floor(core: bare.BareCore, crowd: Crowd, count: int) -> float:
    """Seconds of the same change by a bare client."""
    return bare.alter(core.socket, core.calls(crowd.make(user.email) for user in crowd.users[1 : count + 1]))


def streams(on: Stage, target: Backing, links: Links, core: bare.BareCore) -> None:
    crowd = target.crowd
    fresh = [crowd.make(f"{number}.new") for number in range(STREAM)]
    some = crowd.change(min(STREAM, len(crowd.users) - 1))
    for name, users, remove in (("added", fresh, False), ("changed", some, True)):
        cost = on.measure(lambda users=users: on.controller.sync_user(*users))  # type: ignore[misc]
        alone = bare.alter(core.socket, core.calls(users, remove=remove))
        line(f"stream of {len(users)} {name}", cost, alone, links)
        print(f"{'  a second':30} {len(users) / cost.wall:>7.0f} {len(users) / alone:>7.0f}")
    one_by_one(on, crowd, links, core)


def one_by_one(on: Stage, crowd: Crowd, links: Links, core: bare.BareCore) -> None:
    """Time until a single user's change is in effect."""
    users = crowd.change(min(ALONE, len(crowd.users) - 1))
    alone = bare.effects(core.socket, crowd.tags[-1], users, [core.calls([user])[-1] for user in users])
    headers = credentials(on.node.key, "bearer")
    found = asyncio.run(effects(on.node, headers, f"unix:{on.api}", crowd.tags[-1], users))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        print(
            f"{f'one changed, to effect, {name}':30} {1000 * percentile(found, share):>7.1f} "
            f"{1000 * percentile(alone, share):>7.1f} {'':>19}  {links.drops():>5}",
            flush=True,
        )


@asynccontextmanager
async def stream(target: Target, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """An open SyncUser call; the end of the block awaits its reply."""
    authority = grpc.ssl_channel_credentials(target.pem.encode())
    async with grpc.aio.secure_channel(f"{target.host}:{target.grpc_port}", authority) as channel:
        method = channel.stream_unary(f"/{SERVICE.full_name}/SyncUser", User.SerializeToString, Empty.FromString)
        call = method(metadata=tuple(headers.items()))
        yield call
        await call.done_writing()
        await call


async def effects(target: Target, headers: Mapping[str, str], api: str, tag: str, users: Sequence[User]) -> list[float]:
    """Seconds from sending each user until the core (at `api`) has changed or removed them, one after the other."""
    watch, found = bare.Effects(api, tag), []
    async with stream(target, headers) as call:
        for user in users:
            begun = time.perf_counter()
            await call.write(user)
            await watch.done(user)
            found.append(time.perf_counter() - begun)
    await watch.close()
    return found


def line(name: str, cost: Cost, core: float, links: Links | None = None) -> None:
    drops = "" if links is None else links.drops()
    figures = f"{1000 * cost.wall:>7.0f} {1000 * core:>7.0f} {cost.node:>8.2f}s {cost.core:>8.2f}s"
    print(f"{name:30} {figures}  {drops:>5}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or SIZES)
