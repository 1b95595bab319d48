"""Cost of the door: a gRPC server behind it against the same server with its own TLS, in turns, in one run.

A unary call's p50, and processor time for a stream of 10,000 log lines a second. `python -m scripts.bench.door`
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from node.base.aio import Aio  # first: it sets gRPC's environment

# isort: split
import grpc
import grpc.aio
from twisted.internet import reactor as installed
from twisted.internet.task import LoopingCall

from node.api.auth import Authenticator
from node.api.calls import Calls
from node.api.methods import SERVICE
from node.base.logs import LogRing
from node.door.connections import Connections, Limits
from node.door.entrance import Entrance
from node.door.ports import listen
from node.door.rpc import RpcServer
from node.door.tls import GRPC_FIRST, Certificates, ContextFactory
from node.door.upstream import Upstream
from node.service import SWITCH_INTERVAL
from protos.service_pb2 import BaseInfoResponse, Empty
from scripts.bench.raw import log_stream
from scripts.staging import certs
from scripts.staging.ports import free_port

reactor: Any = installed
KEY = "3f2b8c1e-0d5a-4b6f-9a77-1c2d3e4f5a6b"
METADATA = (("x-api-key", KEY),)
LINES = 10_000
# Batches of lines a second.
PORTIONS = 100
# Bytes of a line on the wire: the HTTP/2 frame's header, the gRPC message's, the field's, and the line.
ON_THE_WIRE = 9 + 5 + 2 + 111
LINE = "2026/11/22 12:00:00.000000 from tcp:203.0.113.7:51234 accepted tcp:example.org:443 [in >> direct] email: 7.user"


class Node:
    """A backend that implements GetBaseInfo only."""

    def touch(self) -> None: ...

    async def info(self, _: Empty, __: object) -> BaseInfoResponse:
        return BaseInfoResponse(version="1.0.0", running=True)


class Direct(RpcServer):
    """The same server on its own port with its own TLS."""

    address: str
    credentials: grpc.ServerCredentials

    def _bound(self) -> Any:
        server = super()._bound()
        server.add_secure_port(self.address, self.credentials)
        return server


def serve(directory: Path, behind: bool, port: int) -> None:
    """Run a server in this process; print its processor time for each line of standard input."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    aio, ring = Aio(reactor), LogRing(reactor, 10_000)
    certificates = Certificates(directory / "cert.pem", directory / "key.pem")
    upstream = Upstream(reactor, directory)
    server = (RpcServer if behind else Direct)(aio, Calls(Node(), ring), Authenticator(KEY), upstream)
    certificates.load()
    if isinstance(server, Direct):
        pair = certificates.current.pair
        server.address, server.credentials = f"127.0.0.1:{port}", grpc.ssl_server_credentials([(pair.key, pair.chain)])
    aio.start()
    aio.block(server.start(), 10)
    if behind:
        entrance = Entrance(Connections(reactor, Limits(), lambda *_: False), None, upstream)
        listen(reactor, entrance.secured(ContextFactory(certificates, GRPC_FIRST)), port, "127.0.0.1")
    lines = LoopingCall(ring.extend, [LINE] * (LINES // PORTIONS))
    reactor.callInThread(_talk, lines)
    reactor.run()


def _talk(lines: LoopingCall) -> None:
    for word in sys.stdin:
        if word.strip() == "lines":
            reactor.callFromThread(lambda: lines.stop() if lines.running else lines.start(1 / PORTIONS))
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime, flush=True)
    reactor.callFromThread(reactor.stop)


class Served:
    """A process of `serve`, and a client of it."""

    def __init__(self, directory: Path, behind: bool) -> None:
        port = self.port = free_port()
        self.pem = (directory / "cert.pem").read_text()
        argv = [sys.executable, "-m", "scripts.bench.door", "--serve", str(directory), str(int(behind)), str(port)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        credentials = grpc.ssl_channel_credentials(self.pem.encode())
        self._channel = grpc.secure_channel(f"127.0.0.1:{port}", credentials, [("grpc.use_local_subchannel_pool", 1)])
        self._info = self._channel.unary_unary(f"/{SERVICE.full_name}/GetBaseInfo")
        self._info(b"", metadata=METADATA, wait_for_ready=True, timeout=20)

    def call(self) -> float:
        """Make one call. Returns its milliseconds."""
        begun = time.perf_counter()
        self._info(b"", metadata=METADATA)
        return (time.perf_counter() - begun) * 1000

    def processor(self, word: str = "") -> float:
        """The server's processor seconds so far. The word "lines" starts or stops its logging."""
        assert self._process.stdin
        assert self._process.stdout
        print(word, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def stream(self, seconds: float) -> tuple[float, float]:
        """Lines a second that a reader received, and the server's processor seconds a second."""
        self.processor("lines")
        with log_stream(self.port, self.pem, dict(METADATA)) as link:
            until = time.perf_counter() + 0.5
            while time.perf_counter() < until:
                link.recv(65_536)
            got, before, begun = 0, self.processor(), time.perf_counter()
            while (took := time.perf_counter() - begun) < seconds:
                got += len(link.recv(65_536))
            return got / ON_THE_WIRE / took, (self.processor("lines") - before) / took

    def close(self) -> None:
        self._channel.close()
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def both() -> Iterator[tuple[Served, Served]]:
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        found = []
        for behind in (False, True):
            directory = Path(work) / str(behind)
            directory.mkdir()
            pair = certs.make(directory, ["localhost", "127.0.0.1"])
            pair.certificate.rename(directory / "cert.pem")
            pair.key.rename(directory / "key.pem")
            found.append(Served(directory, behind))
            stack.callback(found[-1].close)
        yield found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of each server (default: 10)")
    parser.add_argument("--calls", type=int, default=200, help="in a round (default: 200)")
    parser.add_argument("--seconds", type=float, default=2, help="of log lines in a round (default: 2)")
    parser.add_argument("--serve", nargs=3, metavar=("DIRECTORY", "BEHIND", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        # Server and client run on different processors, so that neither waits for the other's threads.
        os.sched_setaffinity(0, {0})
        serve(Path(options.serve[0]), options.serve[1] == "1", int(options.serve[2]))
        return
    os.sched_setaffinity(0, {(os.cpu_count() or 1) - 1})
    with both() as pair:
        p50, used, rate, cpu = (_columns() for _ in range(4))
        for _ in range(options.rounds):
            for place, served in enumerate(pair):
                before = served.processor()
                p50[place].append(statistics.median(served.call() for _ in range(options.calls)))
                used[place].append((served.processor() - before) / options.calls * 1000)
        for _ in range(options.rounds):
            for place, served in enumerate(pair):
                lines, busy = served.stream(options.seconds)
                rate[place].append(lines)
                cpu[place].append(busy)
    report("a call's p50", p50, "ms")
    report("processor time of a call", used, "ms")
    report("log lines", rate, "a second")
    report("processor time for them", cpu, "s a second")


def _columns() -> list[list[float]]:
    return [[], []]


def report(what: str, values: Sequence[Sequence[float]], unit: str) -> None:
    direct, behind = map(statistics.median, values)
    more = f"{behind - direct:+.3f}, {behind / direct:.2f} times"
    print(f"{what}: direct {direct:.3f}, behind the door {behind:.3f} {unit} ({more})")


if __name__ == "__main__":
    main()
