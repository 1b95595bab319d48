"""Profile the node's processor time while a controller repeats one kind of call.

`python -m scripts.bench.profile [info|rest-info|rest-updates|stream|start|sync|stats] [--users N] [--save FILE]`

It needs no other program and no privileges: a thread inside the node samples its stacks (`sampled/sitecustomize.py`).
So small figures are imprecise, and code that holds the GIL for long is attributed to its end. `--save` writes the
stacks in the format of flame graph tools.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from protos.service_pb2 import StatRequest, Users, UsersStat
from scripts.bench.arena import INTERVAL
from scripts.bench.calls import STREAM, feed
from scripts.bench.sides import Ours, Protocol, calling
from scripts.bench.stacks import Stacks, parsed, report
from scripts.bench.stage import backing, machine, stage
from scripts.staging.wait import until

SECONDS = 6.0
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


def asking(protocol: Protocol, name: str, body: bytes, side: Ours, until_then: float) -> int:
    with calling(side, protocol) as call:
        return repeated(lambda: call(name, body), until_then)


def updates(side: Ours, until_then: float) -> int:
    with calling(side, "rest") as call:
        crowd = side.backing.crowd
        return repeated(lambda: call("SyncUser", crowd.change(1)[0].SerializeToString()), until_then)


def stream(side: Ours, until_then: float) -> int:
    crowd, done = side.backing.crowd, 0
    while time.monotonic() < until_then:
        feed(side, "SyncUser", [user.SerializeToString() for user in crowd.change(STREAM)])
        done += STREAM
    return done


def start(side: Ours, until_then: float) -> int:
    body = side.backing.request().SerializeToString()
    with calling(side, "grpc") as call:
        return repeated(lambda: (call("Stop", b""), call("Start", body)), until_then)


def sync(side: Ours, until_then: float) -> int:
    """Sync all users, one in a hundred changed."""
    crowd = side.backing.crowd

    def once() -> None:
        crowd.change(len(crowd.users) // 100)
        call("SyncUsers", Users(users=crowd.users).SerializeToString())

    with calling(side, "grpc") as call:
        return repeated(once, until_then)


WORK: dict[str, Callable[[Ours, float], int]] = {
    "info": partial(asking, "grpc", "GetBaseInfo", b""),
    "rest-info": partial(asking, "rest", "GetBaseInfo", b""),
    "rest-updates": updates,
    "stream": stream,
    "start": start,
    "sync": sync,
    "stats": partial(asking, "grpc", "GetStats", StatRequest(type=UsersStat).SerializeToString()),
}


def repeated(work: Callable[[], object], until_then: float) -> int:
    done = 0
    while time.monotonic() < until_then:
        work()
        done += 1
    return done


def profiled(name: str, users: int, seconds: float) -> tuple[Stacks, float, int]:
    """The stacks, processor seconds of the whole process, and the number of calls."""
    with stage(TRAFFIC_INTERVAL=INTERVAL) as on:
        on.node.stop()
        out = on.directory / "samples"
        on.node.environment |= {"PYTHONPATH": f"{_HERE / 'sampled'}:{_ROOT}", "TXNODE_SAMPLES": str(out)}
        on.node.start()
        side, switch = Ours(on), Path(f"{out}.on")
        side.backing = backing(users)
        with calling(side, "grpc") as call:
            call("Start", side.backing.request().SerializeToString())
        switch.touch()
        used = side.used
        done = WORK[name](side, time.monotonic() + seconds)
        used = side.used - used
        switch.unlink()
        until(out.exists, 10, "the node writes its samples")
        return parsed(out.read_text()), used, done


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m scripts.bench.profile", description=__doc__)
    parser.add_argument("what", nargs="?", choices=[*WORK], default="rest-updates", help="default: rest-updates")
    parser.add_argument("--users", type=int, default=10_000, help="default: 10,000")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"default: {SECONDS:g}")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the stacks to FILE")
    given = parser.parse_args(argv)
    print(machine())
    stacks, used, done = profiled(given.what, given.users, given.seconds)
    print(f"{given.what}, {given.users} users: {done} calls, {1e3 * used / done:.2f} ms of processor time each")
    print(*report(stacks, used), sep="\n")
    if given.save:
        given.save.write_text("".join(f"{';'.join(stack)} {micros}\n" for stack, micros in stacks))


if __name__ == "__main__":
    main()
