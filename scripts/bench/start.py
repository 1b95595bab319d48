"""How long a Start takes, from the call to the reply and to the first byte through the proxy; beside it the core alone.

`python -m scripts.bench.start [USERS ...]` prints a table: medians of five runs each, in milliseconds. The floor is
what the core itself needs, measured in the same run: converting the configuration, and starting from the finished
message until its API answers.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import grpc

from drivers.xray import config
from drivers.xray.api import STATS
from node.users import Roster
from protos import service_pb2, xray_pb2
from tests.harness import certs, socks
from tests.harness.backend import backend_config, user
from tests.harness.core import XrayClient, find_xray
from tests.harness.cover import CoverServer
from tests.harness.echo import EchoServer
from tests.harness.inbounds import Kind, kinds
from tests.harness.node import NodeProcess
from tests.harness.ports import free_port
from tests.harness.rpc import Rpc
from tests.harness.users import TestUser

ROUNDS = 5
SIZES = (0, 1_000, 10_000, 50_000)
TAG = "vless"


def main(sizes: list[int]) -> None:
    print(f"{'users':>7} {'Start':>7} {'first byte':>11} {'floor: convert':>15} {'core ready':>11}")
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        certificate = certs.make(directory, ["proxy.test"])
        with CoverServer(directory) as cover, NodeProcess(directory) as node, Rpc(node) as rpc, EchoServer() as echo:
            kind = kinds(certificate, cover.port)["vless-raw"]
            for size in sizes:
                row(size, kind, rpc, echo, directory)


def row(size: int, kind: Kind, rpc: Rpc, echo: EchoServer, directory: Path) -> None:
    port, probe = free_port(), TestUser.new("probe")
    users = [user(probe, {TAG: kind}), *(plain(number) for number in range(size))]
    text = backend_config([kind.inbound(port, TAG)])
    request = service_pb2.Backend(config=text, users=users)
    replies, bytes_seen = [], []
    with XrayClient({(proxy := free_port()): kind.outbound(port, probe)}):
        for _ in range(ROUNDS):
            rpc.Stop(service_pb2.Empty())
            begun = time.perf_counter()
            rpc.Start(request)
            replies.append(time.perf_counter() - begun)
            first_byte(proxy, echo)
            bytes_seen.append(time.perf_counter() - begun)
    converting, starting = floor(text, users, directory)
    figures = (median(replies), median(bytes_seen), converting, starting)
    print(f"{size:>7} {figures[0]:>7.0f} {figures[1]:>11.0f} {figures[2]:>15.0f} {figures[3]:>11.0f}", flush=True)


def plain(number: int) -> service_pb2.User:
    account = service_pb2.Vless(id=str(uuid.uuid4()))
    return service_pb2.User(email=f"{number}.user", proxies=service_pb2.Proxy(vless=account), inbounds=[TAG])


def first_byte(proxy: int, echo: EchoServer) -> None:
    """One byte there and back, tried until it works."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with socks.connect(proxy, echo.host, echo.port, timeout=2) as link:
                link.sendall(b"echo 1\nx")
                if link.recv(1):
                    return
        except OSError:
            continue
    raise SystemExit("nothing came through the proxy")


def floor(text: str, users: list[service_pb2.User], directory: Path) -> tuple[float, float]:
    """The core alone: milliseconds to convert the configuration, and to answer once it has the finished message."""
    xray, converted = str(find_xray()), directory / "converted"
    converting = median([timed(lambda: convert(xray, text, converted)) for _ in range(ROUNDS)])
    plan = config.plan(converted.read_bytes(), text, frozenset())
    roster, _ = Roster.of(users, plan.tags, plan.account)
    starts = []
    for number in range(ROUNDS):
        endpoint = config.Endpoint(str(directory / f"{len(users)}-{number}.sock"), f"floor{number}", False)
        message = config.render(plan, endpoint, roster.target)
        starts.append(start_core(xray, message, endpoint.socket))
    return converting, median(starts)


def convert(xray: str, text: str, output: Path) -> None:
    subprocess.run(
        [xray, "convert", "pb", "-outpbfile", str(output), "stdin:"],
        input=text.encode(),
        check=True,
        capture_output=True,
    )


def start_core(xray: str, message: bytes, path: str) -> float:
    environment = {"PATH": os.defpath, "GODEBUG": "multipathtcp=0"}
    begun = time.perf_counter()
    core = subprocess.Popen(
        [xray, "run", "-format", "protobuf", "-c", "stdin:"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    try:
        assert core.stdin is not None
        core.stdin.write(message)
        core.stdin.close()
        while not connects(path):
            assert core.poll() is None, "the core ended"
            time.sleep(0.002)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            call = channel.unary_unary(
                STATS + "GetSysStats", xray_pb2.Nothing.SerializeToString, xray_pb2.SysStatsResponse.FromString
            )
            call(xray_pb2.Nothing(), wait_for_ready=True, timeout=10)
        return time.perf_counter() - begun
    finally:
        core.terminate()
        core.wait()


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def median(seconds: list[float]) -> float:
    """Milliseconds."""
    return 1000 * statistics.median(seconds)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(SIZES))
