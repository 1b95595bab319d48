"""Another node with the same interface, as a process, for comparison. It speaks one protocol at a time.

Its settings are environment variables: SERVICE_PROTOCOL, SERVICE_PORT, API_KEY, SSL_CERT_FILE, SSL_KEY_FILE and
XRAY_EXECUTABLE_PATH. It takes the key as `x-api-key`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil

from drivers.xray.api import STATS
from scripts.bench.sides import Protocol, Side
from scripts.staging import certs
from scripts.staging.core import find_xray
from scripts.staging.ports import free_port
from scripts.staging.target import Address
from scripts.staging.wait import accepts, until

_READY = 20.0


class Peer(Side):
    """The other node, running. `listened` is the seconds until its port accepted connections."""

    @property
    def core(self) -> int:
        """The pid of its newest Xray."""
        children = psutil.Process(self.pid).children()
        return max((child for child in children if child.exe() == str(find_xray().resolve())), key=_age).pid

    @property
    def api(self) -> str:
        """The address of the core's API: the listening port that replies to GetSysStats."""
        connections = psutil.Process(self.core).net_connections("tcp")
        ports = {link.laddr.port for link in connections if link.status == psutil.CONN_LISTEN}
        return next(f"127.0.0.1:{port}" for port in ports - set(self.backing.ports) if _answers(port))


@contextmanager
def peer(executable: Path, protocol: Protocol) -> Iterator[Peer]:
    with tempfile.TemporaryDirectory() as work, (Path(work) / "output").open("wb") as output:
        directory, port, key = Path(work), free_port(), str(uuid.uuid4())
        pair = certs.make(directory, ["localhost", "127.0.0.1"])
        environment = _environment(directory, protocol, port, key) | {
            "SSL_CERT_FILE": str(pair.certificate),
            "SSL_KEY_FILE": str(pair.key),
        }
        begun = time.perf_counter()
        # Output to a file: reading it would take processor time from the client.
        process = subprocess.Popen([executable], env=environment, cwd=directory, stdout=output, stderr=output)
        try:
            until(lambda: accepts(port), _READY, f"{executable} accepts on {port}")
            target = Address("127.0.0.1", port, port, key, pair.certificate.read_text())
            yield Peer("peer", target, process.pid, time.perf_counter() - begun)
        finally:
            process.terminate()
            process.wait(_READY)


def _environment(directory: Path, protocol: Protocol, port: int, key: str) -> dict[str, str]:
    return {
        "PATH": os.defpath,
        "HOME": str(directory),
        "SERVICE_PROTOCOL": protocol,
        "SERVICE_PORT": str(port),
        "NODE_HOST": "127.0.0.1",
        "API_KEY": key,
        "XRAY_EXECUTABLE_PATH": str(_own_core(directory)),
        "XRAY_ASSETS_PATH": str(directory),
        "GENERATED_CONFIG_PATH": str(directory),
    }


def _own_core(directory: Path) -> Path:
    """A separate path for Xray: some nodes look for leftover cores by the executable's path and kill them."""
    script = directory / "xray"
    script.write_text(f'#!/bin/sh\nexec {find_xray().resolve()} "$@"\n')
    script.chmod(0o755)
    return script


def _age(process: psutil.Process) -> tuple[float, int]:
    return process.create_time(), process.pid


def _answers(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(STATS + "GetSysStats")(b"", timeout=1)
        except grpc.RpcError:
            return False
        return True
