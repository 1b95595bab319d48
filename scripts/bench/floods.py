"""Latency of a controller's calls, and the node's memory, while a node's ports are flooded.

`python -m scripts.bench.floods [--seconds 5] [--idle 5000] [--renewals 100]`. Each flood goes to both ports at once.
Calls over gRPC use a kept connection, those over REST a new one. Finally the certificate is renewed repeatedly during a
flood of TLS handshakes: none should fail.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from ssl import get_server_certificate
from typing import NamedTuple

import psutil

from scripts.attack.floods import FLOODS, flooding
from scripts.bench.stage import machine
from scripts.staging import certs
from scripts.staging.controller import RestController, RpcController
from scripts.staging.node import NodeProcess
from scripts.staging.process import Child
from scripts.staging.wait import until

# Many idle connections from many addresses, until the end of the block.
_HOLD = """\\
import resource, socket, sys, time

port, count = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, count + 100))
held = []
for number in range(count):
    link = socket.socket()
    link.bind(("127.0.%d.%d" % (10 + number // 2000, 2 + number % 200), 0))
    link.settimeout(10)
    link.connect(("127.0.0.1", port))
    held.append(link)
print("held", flush=True)
time.sleep(3600)
"""

# TLS handshakes only; prints how many there were and how many failed.
_SHAKE = """\\
import socket, ssl, sys, time

port, source = int(sys.argv[1]), sys.argv[2]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
shaken, failed, printed = 0, 0, time.monotonic()
while True:
    try:
        with socket.create_connection(("127.0.0.1", port), 10, (source, 0)) as raw, context.wrap_socket(raw):
            shaken += 1
    except OSError:
        failed += 1
    if time.monotonic() - printed > 0.2:
        printed = time.monotonic()
        print(shaken, failed, flush=True)
"""


class Waits(NamedTuple):
    """Seconds of calls over gRPC and over REST, and the node's memory in MiB: before, at its peak, and now."""

    rpc: Sequence[float]
    rest: Sequence[float]
    memory: tuple[float, float, float]

    def row(self, what: str) -> str:
        worst = " ".join(f"{1000 * max(calls):8.0f}" for calls in (self.rpc, self.rest))
        return f"{what:20} {worst} " + " ".join(f"{value:8.0f}" for value in self.memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5, help="of each flood (default: 5)")
    parser.add_argument("--idle", type=int, default=5000, help="idle connections to each port (default: 5000)")
    parser.add_argument("--renewals", type=int, default=100, help="of the certificate (default: 100)")
    options = parser.parse_args()
    print(machine())
    print(f"{'':20} {'gRPC ms':>8} {'REST ms':>8} {'MiB':>8} {'most':>8} {'after':>8}")
    with tempfile.TemporaryDirectory() as work, NodeProcess(Path(work)) as node:
        for kind in FLOODS:
            with waits(node) as ask, flooding(node.grpc_port, kind) as one, flooding(node.rest_port, kind) as other:
                until(lambda: one() and other(), 20, "the flood has begun")
                ask(options.seconds)
            print(ask(0).row(kind), flush=True)
        with waits(node) as ask, children(node, _HOLD, [str(options.idle)]) as (one, other):
            until(lambda: one.lines and other.lines, 60, "all idle connections are open")
            ask(options.seconds)
        print(ask(0).row(f"{2 * options.idle} idle"), flush=True)
        renewed(node, Path(work), options.renewals)


@contextmanager
def waits(node: NodeProcess) -> Iterator[Callable[[float], Waits]]:
    """Yields a function that calls the node for so many seconds and returns the `Waits` of all calls so far."""
    rpc_waits: list[float] = []
    rest_waits: list[float] = []
    with closing(RpcController(node)) as rpc, closing(RestController(node)) as rest:
        timed(rpc)
        timed(rest)
        before = most = memory(node)

        def ask(seconds: float) -> Waits:
            nonlocal most
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                rpc_waits.append(timed(rpc))
                rest_waits.append(timed(rest))
                most = max(most, memory(node))
            return Waits(rpc_waits, rest_waits, (before, most, memory(node)))

        yield ask
    time.sleep(1)


@contextmanager
def children(node: NodeProcess, script: str, arguments: Sequence[str]) -> Iterator[list[Child]]:
    """Run the script in a process for each port."""
    with ExitStack() as stack:
        argv = [sys.executable, "-ISc", script]
        ports = node.grpc_port, node.rest_port
        yield [stack.enter_context(Child([*argv, str(port), *arguments], {"PATH": os.defpath})) for port in ports]


def renewed(node: NodeProcess, directory: Path, times: int) -> None:
    with children(node, _SHAKE, ["127.0.0.3"]) as shakers:
        until(lambda: all(one.lines for one in shakers), 10, "handshakes succeed")
        begun = time.monotonic()
        for number in range(times):
            at = directory / str(number)
            at.mkdir()
            pair = certs.make(at, ["localhost", node.host])
            pair.certificate.replace(node.certificate.certificate)
            pair.key.replace(node.certificate.key)
            os.kill(node.pid, signal.SIGHUP)
            new = node.certificate.certificate.read_text().strip()
            until(lambda: get_server_certificate((node.host, node.rest_port)).strip() == new)  # noqa: B023
        took = time.monotonic() - begun
        counts = [[int(word) for word in one.lines[-1].split()] for one in shakers]
    shaken, failed = map(sum, zip(*counts, strict=True))
    print(f"{times} renewals in {took:.1f} s: {shaken} handshakes, {failed} failed")


def memory(node: NodeProcess) -> float:
    return float(psutil.Process(node.node_pid).memory_info().rss) / 2**20


def timed(controller: RpcController | RestController) -> float:
    begun = time.monotonic()
    assert controller.info().version
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
