"""The sides that one client measures in a run: this node, another node, and a bare transport."""

from __future__ import annotations

import http.client
import json
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import grpc
import psutil

from node.api.methods import METHODS, SERVICE
from scripts.bench.stage import Backing, Stage, processor
from scripts.staging import certs
from scripts.staging.ports import free_port
from scripts.staging.target import Address, Dialect, credentials
from scripts.staging.wait import accepts, until

Protocol = Literal["grpc", "rest"]
# Takes a method's name and the bytes of its request, returns those of the reply.
Call = Callable[[str, bytes], bytes]
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
_WAYS = {method.name: (method.verbs[0], method.path) for method in METHODS}
_READY = 20.0


class Side:
    """A server under measurement. `listened` is the seconds until it accepted connections, `backing` what it runs."""

    backing: Backing
    dialect: Dialect = "x-api-key"

    def __init__(self, name: str, target: Address, pid: int, listened: float = 0.0) -> None:
        self.name, self.target, self.pid, self.listened = name, target, pid, listened

    @property
    def headers(self) -> dict[str, str]:
        return credentials(self.target.key, self.dialect)

    @property
    def core(self) -> int | None:
        """The pid of its core; None for a bare transport."""
        return None

    @property
    def api(self) -> str:
        """The gRPC address of its core's API."""
        raise NotImplementedError

    @property
    def log(self) -> str:
        """The file to write log lines to: the output of its core, or the standard input of a bare transport."""
        return f"/proc/{self.core}/fd/1" if self.core else f"/proc/{self.pid}/fd/0"

    @property
    def used(self) -> float:
        """Processor seconds of all threads, to the microsecond. See proc(5), schedstat."""
        files = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9

    @property
    def rss(self) -> float:
        """Resident memory in MiB."""
        rows = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(row for row in rows if row.startswith("VmRSS")).split()[1]) / 1024


class Ours(Side):
    dialect = "bearer"

    def __init__(self, on: Stage, listened: float = 0.0) -> None:
        node = on.node
        target = Address(node.host, node.rest_port, node.grpc_port, node.key, node.pem)
        super().__init__("ours", target, node.node_pid, listened)
        self._on = on

    @property
    def core(self) -> int:
        return self._on.core

    @property
    def api(self) -> str:
        return f"unix:{self._on.api}"


@contextmanager
def transport(protocol: Protocol, replies: Mapping[str, bytes]) -> Iterator[Side]:
    """Run a bare server that replies with these bytes, by method name."""
    with tempfile.TemporaryDirectory() as work:
        directory, port = Path(work), free_port()
        pair, file = certs.make(directory, ["localhost", "127.0.0.1"]), directory / "replies"
        file.write_text(json.dumps({_key(protocol, name): reply.hex() for name, reply in replies.items()}))
        argv = [sys.executable, "-m", "scripts.bench.transport", protocol, str(port)]
        argv += map(str, (pair.certificate, pair.key, file))
        begun = time.perf_counter()
        process = subprocess.Popen(argv, stdin=subprocess.PIPE)
        try:
            until(lambda: accepts(port), _READY, "the bare transport accepts")
            target = Address("127.0.0.1", port, port, "key", pair.certificate.read_text())
            yield Side("transport", target, process.pid, time.perf_counter() - begun)
        finally:
            process.kill()
            process.wait()


def _key(protocol: Protocol, name: str) -> str:
    return name if protocol == "grpc" else _WAYS[name][1]


@contextmanager
def calling(side: Side, protocol: Protocol) -> Iterator[Call]:
    """Sequential calls over one kept connection, with Python's simplest client."""
    with (_over_grpc if protocol == "grpc" else _over_rest)(side) as call:
        yield call


@contextmanager
def channel(target: Address) -> Iterator[grpc.Channel]:
    pinned = grpc.ssl_channel_credentials(target.pem.encode())
    with grpc.secure_channel(f"{target.host}:{target.grpc_port}", pinned, OPTIONS) as link:
        yield link


@contextmanager
def _over_grpc(side: Side) -> Iterator[Call]:
    with channel(side.target) as link:
        methods = {name: link.unary_unary(f"/{SERVICE.full_name}/{name}") for name in _WAYS}
        metadata = tuple(side.headers.items())
        yield lambda name, body: methods[name](body, metadata=metadata)


@contextmanager
def _over_rest(side: Side) -> Iterator[Call]:
    target, pinned = side.target, ssl.create_default_context(cadata=side.target.pem)
    headers = {**side.headers, "Content-Type": "application/x-protobuf"}

    def call(name: str, body: bytes) -> bytes:
        link.request(*_WAYS[name], body, headers)
        response = link.getresponse()
        reply = response.read()
        assert response.status == 200, (name, response.status, reply)
        return reply

    with closing(http.client.HTTPSConnection(target.host, target.rest_port, context=pinned)) as link:
        yield call


def medians(
    sides: Mapping[str, Side], rounds: int, measure: Callable[[Side], tuple[float, ...]]
) -> dict[str, tuple[float, ...]]:
    """Medians of each side's figures, measured in turns, so that other load on the machine affects all sides alike."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            found[name].append(measure(side))
    return {name: tuple(map(statistics.median, zip(*rows, strict=True))) for name, rows in found.items()}


def core_used(side: Side) -> float:
    """Processor seconds of its cores, ended ones included, in steps of 10 ms."""
    if side.core is None:
        return 0.0
    parent = psutil.Process(side.core).parent()
    assert parent
    ended = parent.cpu_times()
    return float(ended.children_user + ended.children_system) + processor(side.core)
