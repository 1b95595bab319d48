"""The objectives of docs/slo.md, measured on a node with 50,000 users on Xray.

`python -m scripts.bench.slo` prints each objective beside what it measures, in ten minutes (`--quick`: in two, with
fewer samples). Exit status 1 if one is missed. While calls are measured, a controller over each protocol polls ten
times as often as a panel does, and 500 users move bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import grpc
from google.protobuf.message import Message
from google.protobuf.proto import serialize_length_prefixed

from protos import service_pb2 as pb
from scripts.bench import accounting
from scripts.bench.arena import PROTOCOLS
from scripts.bench.calls import NAMES
from scripts.bench.load import loading
from scripts.bench.objectives import OBJECTIVES, faults, line, markdown
from scripts.bench.overlap import AROUND, TAG, on_xray, working
from scripts.bench.results import Row, to_json
from scripts.bench.sides import Call, Protocol, Side, calling
from scripts.bench.stage import KIND, LIVE, Backing, Crowd, Links, Stage, first_byte, machine, percentile, stage
from scripts.bench.upgrade import Caller, kill, serves, upgrade
from scripts.staging.backend import backend_config
from scripts.staging.controller import RestController, RpcController
from scripts.staging.ports import free_port
from scripts.staging.target import Address
from scripts.staging.version import Version

# Users; those who move bytes and never change; those who change in one list of all; those of one chunk.
USERS, ACTIVE, CHANGED, CHUNK = 50_000, 500, 20, 100
# Seconds between a controller's polls, between two calls, and between two with all users.
POLLED, PAUSE, LONG = 1.0, 0.005, 0.05
# Seconds of each part, of which --quick takes a share, and how often each is done at least.
SECONDS = {"calls": 125, "lists": 80, "reconnects": 30, "starts": 80, "changes": 40, "upgrades": 25, "kills": 45}
SECONDS |= {"cores": 25, "bytes": 80}
QUICK, LEAST = 0.15, 3
# Seconds that a kill in `accounting` takes.
_KILL = 7.0
_EXTRA = {
    "observatory": {"subjectSelector": ["nothing"]},
    "routing": {"balancers": [{"tag": "both", "selector": ["direct"]}]},
}
_POLLS = {
    "GetStats of all users, reset": pb.StatRequest(type=pb.UsersStat, reset=True),
    "GetStats of outbounds, reset": pb.StatRequest(type=pb.Outbounds, reset=True),
    "GetBackendStats": pb.Empty(),
    "GetSystemStats": pb.Empty(),
}

# The milliseconds of calls, by the name of the objective.
Times = defaultdict[str, list[float]]


class Panel:
    """A controller's connection over one protocol. It keeps the time of each call: for ever, if it fails."""

    def __init__(self, protocol: Protocol, call: Call, times: Times) -> None:
        self._protocol, self._call, self._times = protocol, call, times

    def ask(self, what: str, message: Message) -> None:
        """Call the operation that the first word of `what` names."""
        name = what.replace(",", "").split()[0]
        body = io.BytesIO()
        if name == "SyncUsersChunked" and self._protocol == "rest":
            serialize_length_prefixed(message, body)
        else:
            body.write(message.SerializeToString())
        self.timed(what, lambda: self._call(name, body.getvalue()))

    def reconnect(self, request: pb.Backend) -> None:
        """Stop and Start, as a panel does."""
        body = request.SerializeToString()
        self.timed("Stop and Start", lambda: (self._call("Stop", b""), self._call("Start", body)))

    def timed(self, what: str, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        try:
            work()
            took = time.perf_counter() - begun
        except (grpc.RpcError, AssertionError) as error:
            print(f"{what} failed: {error}", flush=True)
            took = math.inf
        self._times[f"{what} over {NAMES[self._protocol]}, p99"].append(1000 * took)


def main(argv: Sequence[str]) -> int:
    given = arguments().parse_args(argv)
    print(begun := machine())
    rows = list[Row]()
    for name in given.only or PARTS:
        for row in PARTS[name](QUICK if given.quick else 1.0):
            print(line(row), flush=True)
            rows.append(row)
    print(machine())
    if given.save:
        given.save.write_text(to_json(rows, begun))
    if given.markdown:
        print(*markdown(rows), sep="\n")
    return reported(faults(rows, [] if given.only else OBJECTIVES))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m scripts.bench.slo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples, in two minutes")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures to FILE as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown, too")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], help="only these parts")
    return parser


def reported(found: Sequence[str]) -> int:
    """Print the faults. Returns the exit status: 1 if there are any."""
    print(*found or ["every objective is met"], sep="\n")
    return int(bool(found))


def calls(share: float) -> Iterator[Row]:
    """Calls in turn while controllers poll, then repeated Starts; connections of users must survive all."""
    times, longs, again = Times(list), Times(list), Times(list)
    with crowded() as (on, target), on.client(target) as proxy, Links(proxy, on.echo) as links:
        with loading() as load:
            load.open([user.proxies.vless.id for user in target.crowd.users[1:ACTIVE]], target.ports[0])
            with polling(on, times) as panels:
                for _ in rounds("calls", share):
                    load.move()
                    ask(panels, asks(target.crowd), PAUSE)
            with polling(on, longs) as panels:
                for _ in rounds("lists", share):
                    load.move()
                    target.crowd.change(CHANGED)
                    ask(panels, long_asks(target), LONG)
        yield Row("dropped by syncs and other calls", f"of {LIVE}", links.drops(), samples=counted(times, longs))
        with panels_of(on, again) as panels:
            for _ in rounds("reconnects", share):
                for panel in panels:
                    panel.reconnect(target.request())
        yield Row("dropped by repeated Starts", f"of {LIVE}", links.drops(), samples=counted(again))
    # Polls beside calls with all users have no objective.
    found = longs | times | again
    for name in OBJECTIVES:
        if name in found:
            yield p99(name, found[name])


def ask(panels: Sequence[Panel], messages: Mapping[str, Callable[[], Message]], pause: float) -> None:
    """Make each of the calls once over each protocol."""
    for panel in panels:
        for what, make in messages.items():
            panel.ask(what, make())
            time.sleep(pause)


def asks(crowd: Crowd) -> Mapping[str, Callable[[], Message]]:
    """Makes the message of each call, by the name of its objective."""
    name = crowd.users[1].email
    limits = pb.UserLimits(name=name, limits=pb.Limits(addresses=100))
    return {
        "GetBaseInfo": pb.Empty,
        "GetSystemStats": pb.Empty,
        "GetBackendStats": pb.Empty,
        "GetStats of one user": lambda: pb.StatRequest(type=pb.UserStat, name=name),
        "GetUserOnlineStats": lambda: pb.StatRequest(name=name),
        "GetUserOnlineIpListStats": lambda: pb.StatRequest(name=name),
        "GetOutboundsLatency": pb.LatencyRequest,
        "GetBill": pb.BillRequest,
        "GetLimits of one user": lambda: pb.GetLimitsRequest(names=[name]),
        "SetLimits of one user": lambda: pb.SetLimitsRequest(users=[limits]),
        "ListUsers, a page": pb.ListUsersRequest,
        "ListOnline, a page": pb.ListOnlineRequest,
        "SyncUser": lambda: crowd.change(1)[0],
        "SyncUsersChunked, 100 users": lambda: pb.UsersChunk(users=crowd.change(CHUNK), last=True),
        "DropConnections": lambda: pb.DropConnectionsRequest(name=crowd.users[-1].email),
        "ListRoutingRules": pb.Empty,
        "TestRoute": lambda: pb.TestRouteRequest(target_domain="example.com"),
        "GetBalancerInfo": lambda: pb.BalancerInfoRequest(tag="both"),
        "OverrideBalancerTarget": lambda: pb.OverrideBalancerTargetRequest(balancer_tag="both", target="direct"),
        "GetJob": pb.JobRequest,
    }


def long_asks(target: Backing) -> Mapping[str, Callable[[], Message]]:
    """The same for calls with all users, or which the core checks with all users."""
    rule = json.dumps({"ruleTag": "one", "domain": ["example.com"], "outboundTag": "direct"})
    return {
        "SyncUsers": lambda: pb.Users(users=target.crowd.users),
        "Start again": target.request,
        "AddRoutingRule": lambda: pb.AddRoutingRuleRequest(rule=rule),
        "RemoveRoutingRule": lambda: pb.RemoveRoutingRuleRequest(rule_tag="one"),
    }


def starts(share: float) -> Iterator[Row]:
    """Starts after a Stop that ended the core, over both protocols in turn."""
    times = Times(list)
    with crowded() as (on, target), panels_of(on, times) as panels:
        for _ in rounds("starts", share):
            for panel in panels:
                on.controller.stop()
                panel.ask("Start", target.request())
    yield p99("first Start, p99", [took for found in times.values() for took in found])


def disturbances(share: float) -> Iterator[Row]:
    """Changed configurations, upgrades and kills of the node, while users have connections and open new ones."""
    with tempfile.TemporaryDirectory() as directory:
        version, numbers = Version(Path(directory)), count()
        with stage(TRAFFIC_INTERVAL="", PYTHONPATH=str(version.root)) as on:
            crowd, port = Crowd(USERS, [TAG]), free_port()

            def change() -> float:
                begun = time.monotonic()
                on.controller.start(on_xray(port, crowd, next(numbers)))
                return begun

            change()
            users = partial(under_traffic, on, crowd, port)
            changes = users(change, rounds("changes", share))
            upgrades = users(lambda: upgrade(on, version, f"9.0.{next(numbers)}"), rounds("upgrades", share))
            kills = users(lambda: kill(on), rounds("kills", share))
    found = {"changed configurations": changes, "upgrades": upgrades, "kill -9 of the node": kills}
    for what, each in found.items():
        yield Row(f"dropped by {what}", f"of {LIVE}", each.dropped, samples=len(each.took))
    failed = sum(each.failed for each in found.values())
    tried = failed + sum(each.opened for each in found.values())
    yield Row("new connections failed in these three", "of 1,000", 1000 * failed / tried, samples=tried)
    yield longest("changed configuration, longest", "ms", [1000 * took for took in changes.took])
    yield longest("upgrade, longest without a reply", "s", upgrades.gaps)
    yield longest("node killed, serves again, longest", "s", kills.took)


class Disturbed(NamedTuple):
    """Seconds of each step, the longest times without a reply around them, and what happened to users' connections."""

    took: Sequence[float]
    gaps: Sequence[float]
    dropped: int
    failed: int
    opened: int


def under_traffic(on: Stage, crowd: Crowd, port: int, step: Callable[[], float], times: Iterable[int]) -> Disturbed:
    """Do this so many times; a step returns when it began."""
    took, gaps = list[float](), list[float]()
    with ExitStack() as stack:
        workers = stack.enter_context(working(on, crowd, port))
        ways = (RestController, True), (RpcController, False)
        callers = [stack.enter_context(closing(Caller(on, *way))) for way in ways]
        for _ in times:
            begun = step()
            took.append(time.monotonic() - begun)
            time.sleep(AROUND)
            gaps.append(max(caller.gap(begun) for caller in callers))
        for worker in workers:
            worker.rest()
    lost = (sum(len(getattr(worker, what)) for worker in workers) for what in ("dropped", "failed", "opened"))
    return Disturbed(took, gaps, *lost)


def cores(share: float) -> Iterator[Row]:
    """Kills of a core, until a user's new connection is served."""
    took = list[float]()
    with crowded() as (on, target), on.client(target) as proxy:
        for _ in rounds("cores", share):
            # A core that is killed again and again is started after growing pauses.
            on.controller.stop()
            on.controller.start(target.request())
            begun = time.monotonic()
            os.kill(on.core, signal.SIGKILL)
            first_byte(target.ports[0], proxy, on.echo)
            took.append(time.monotonic() - begun)
            serves(on)
    yield longest("core killed, users served again, longest", "s", took)


def billed(share: float) -> Iterator[Row]:
    """Bytes that users push against those billed, over restarts and kills."""
    kills = int(SECONDS["bytes"] * share / _KILL)
    with stage(TRAFFIC_INTERVAL="") as on:
        found = accounting.measure(on, on_xray, max(len(accounting.WAYS), kills), USERS)
    for what, way in {"restarts": "a restart", "kill -9 of the node": "the node"}.items():
        yield Row(f"bytes lost by {what}", "B", sum(found[way].bytes), samples=found[way].kills)
    yield longest("kill -9 of a core, age of lost bytes", "s", found["the core"].ages)
    for what, counts in {
        "kills that lost more than promised": [losses.beyond for losses in found.values()],
        "kills after which too much was billed": [losses.too_much for losses in found.values()],
    }.items():
        yield Row(what, "", sum(counts), samples=sum(losses.kills for losses in found.values()))


PARTS = {"calls": calls, "starts": starts, "disturbances": disturbances, "cores": cores, "bytes": billed}


@contextmanager
def crowded() -> Iterator[tuple[Stage, Backing]]:
    """A node with the usual settings that runs all users."""
    port = free_port()
    config = backend_config([KIND.inbound(port, TAG)], **_EXTRA)
    target = Backing(Crowd(USERS, [TAG], steady=ACTIVE), [port], config)
    with stage(TRAFFIC_INTERVAL="") as on:
        on.controller.start(target.request())
        yield on, target


@contextmanager
def panels_of(on: Stage, times: Times) -> Iterator[Sequence[Panel]]:
    """An open connection over each protocol."""
    node = on.node
    address = Address(node.host, node.rest_port, node.grpc_port, node.key, node.pem)
    side = Side("panel", address, node.node_pid)
    with ExitStack() as stack:
        kept = {protocol: stack.enter_context(calling(side, protocol)) for protocol in PROTOCOLS}
        for call in kept.values():
            call("GetBaseInfo", b"")
        yield [Panel(protocol, call, times) for protocol, call in kept.items()]


@contextmanager
def polling(on: Stage, times: Times) -> Iterator[Sequence[Panel]]:
    """The same; inside, a second connection over each protocol polls, and the log is read."""
    over = threading.Event()

    def poll(panel: Panel) -> None:
        while not over.wait(POLLED):
            for what, message in _POLLS.items():
                panel.ask(what, message)

    with panels_of(on, times) as panels, panels_of(on, times) as others, ThreadPoolExecutor() as pool:
        polls = [pool.submit(poll, other) for other in others]
        try:
            with on.controller.logs():
                yield panels
        finally:
            over.set()
        for each in polls:
            each.result()


def rounds(part: str, share: float) -> Iterator[int]:
    """Numbers, until this share of the part's time has passed."""
    begun = time.monotonic()
    for number in count():
        if number >= LEAST and time.monotonic() - begun > share * SECONDS[part]:
            return
        yield number


def counted(*times: Times) -> int:
    return sum(len(found) for each in times for found in each.values())


def p99(name: str, milliseconds: Sequence[float]) -> Row:
    return Row(name, "ms", percentile(milliseconds, 0.99), samples=len(milliseconds))


def longest(name: str, unit: str, found: Sequence[float]) -> Row:
    return Row(name, unit, max(found), samples=len(found))


if __name__ == "__main__":
    # So that TERM stops the nodes and cores as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
