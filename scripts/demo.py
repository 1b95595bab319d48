"""Demonstrates a node and prints how to call it, for scripts/run: `python -m scripts.demo PID WHEN CORE`.

It is an ordinary controller, with the node's address, certificate and key. WHEN is "first" (unless shown before),
"always" or "never", CORE one of SHOWN.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from drivers.install import install
from drivers.install.leash import leashed
from drivers.install.releases import SING_BOX, XRAY, Core
from drivers.process.closed import own_addresses
from drivers.registry import DRIVER_SETTINGS
from node.base.errors import NodeError
from node.settings import BadSettings, Settings, load
from protos.service_pb2 import Backend, UserStat
from scripts.staging import protocols, sing_box, transfer, transports
from scripts.staging.backend import backend, user
from scripts.staging.controller import ControllerError, RestController, RpcController
from scripts.staging.core import ENVIRONMENT, Json, client_config
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from scripts.staging.target import Address
from scripts.staging.users import TestUser
from scripts.staging.wait import accepts, until

SIZE = 8 * 1024 * 1024
# Bytes between two checks whether the other configuration is in force.
PIECE = 256 * 1024
# The user's source address: Xray never lists 127.0.0.1 as online.
SOURCE = "127.0.0.2"
LOG_LINES = 4
# Seconds within which the node must have counted all bytes.
COUNTING = 15.0
# Seconds without a log line after which the node has sent its backlog.
QUIET = 0.5
# Seconds after which the node stops the backend if the demonstration is killed.
KEEP_ALIVE = 60
VLESS = Kind("vless", protocols.vless(), transports.raw())


class Failed(Exception):
    """The demonstration cannot go on; the text is for the operator."""


def say(label: str, text: str) -> None:
    print(f"  {label:<13}{text}", flush=True)


@dataclass(frozen=True)
class Shown:
    """A core with one user of VLESS: its backend, and the user's client, which has a SOCKS port.

    `more` is what the changed configuration has in addition.
    """

    core: Core
    backend: Callable[..., Backend]
    client: Callable[[int, int, TestUser], bytes]
    arguments: Sequence[str]
    more: Mapping[str, Json]


def _on_xray(port: int, person: TestUser, **more: Json) -> Backend:
    return backend([VLESS.inbound(port, "demo")], [user(person, {"demo": VLESS})], KEEP_ALIVE, (), **more)


def _by_xray(socks: int, port: int, person: TestUser) -> bytes:
    return json.dumps(client_config({socks: VLESS.outbound(port, person, source=SOURCE)})).encode()


def _on_sing_box(port: int, person: TestUser, **more: Json) -> Backend:
    door = sing_box.Door(sing_box.VLESS, port)
    request = sing_box.backend(door.inbounds, [door.user(person)], (), **more)
    request.keep_alive = KEEP_ALIVE
    return request


def _by_sing_box(socks: int, port: int, person: TestUser) -> bytes:
    (outbound,) = sing_box.Door(sing_box.VLESS, port).outbounds(person)
    return sing_box.client_config({socks: [{**outbound, "inet4_bind_address": SOURCE}]})


BLOCKED = "blocked.test"
XRAY_RULE = {"rules": [{"type": "field", "domain": [f"domain:{BLOCKED}"], "outboundTag": "block"}]}
SING_BOX_RULE = {"rules": [{"domain_suffix": [BLOCKED], "action": "reject"}]}
SHOWN = {
    "xray": Shown(XRAY, _on_xray, _by_xray, ("run", "-c", "stdin:"), {"routing": XRAY_RULE}),
    "sing-box": Shown(SING_BOX, _on_sing_box, _by_sing_box, ("run", "-c", "stdin"), {"route": SING_BOX_RULE}),
}


def show(pid: int, when: str, core: str) -> None:
    """Wait until the node serves, show the demonstration if it is due, and print how to call the node."""
    settings = settings_here()
    ports = {port for port in (settings.door.rest_port, settings.door.grpc_port) if port is not None}
    if not serves(pid, ports):
        return  # scripts/run prints why
    say("node", f"serves; its log is {_path(settings.state.dir / 'node.log')}")
    marker = settings.state.dir / f"demo-shown-{core}"
    wanted = when == "always" or (when == "first" and not marker.exists())
    if wanted and demonstrate(settings, SHOWN[core]):
        marker.touch()
    print_usage(settings)


def settings_here() -> Settings:
    """The settings of the node started here. Raises `BadSettings`."""
    return load({}, Path.cwd(), drivers=DRIVER_SETTINGS)


def serves(pid: int, ports: set[int]) -> bool:
    """Wait until this process listens on the ports. False if it ends instead."""
    return until(lambda: _stage(pid, ports), 30, f"the node listens on {sorted(ports)}") == "serves"


def _stage(pid: int, ports: set[int]) -> str:
    try:
        process = psutil.Process(pid)
        connections = process.net_connections("tcp")
        ended = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return "ended"
    listening = {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    return "ended" if ended else "serves" if ports <= listening else ""


def demonstrate(settings: Settings, shown: Shown) -> bool:
    """Send 8 MiB of one user through a backend, and print what the node reports. Leaves nothing in the node.

    Prints why and returns False if this node cannot be used.
    """
    print(f"\nDemonstration: one user sends {SIZE >> 20} MiB through VLESS", flush=True)
    if settings.door.rest_port is None or settings.door.grpc_port is None:
        say("skipped", "the demonstration needs both REST and gRPC, and one of them is off")
        return False
    ports = settings.door.rest_port, settings.door.grpc_port
    node = Address(_host(settings), *ports, settings.keys.key, settings.door.cert_file.read_text())
    person, port = TestUser.new("demo"), free_port()
    # Users do not get to loopback: see docs/proxied-users.md.
    own = next((address for address in own_addresses() if ":" not in address), None)
    if own is None:
        say("skipped", "the demonstration needs an address of this machine that is not loopback")
        return False
    with closing(RpcController(node)) as rpc:
        state = rpc.info().state
        if state != "stopped":
            say("skipped", f"the node already has a backend ({state}), which the demonstration would end")
            return False
        with _backend(rpc, shown.backend(port, person), port):
            with EchoServer(own) as destination, _client(settings, shown, port, person) as socks:
                _change(rpc, socks, destination, shown.backend(port, person, **shown.more))
                _send(rpc, socks, destination, person)
            _print_counted(rpc, person)
            _print_log(node)
    say("stopped", "the backend of the demonstration")
    return True


@contextmanager
def _backend(rpc: RpcController, request: Backend, port: int) -> Iterator[None]:
    began = time.monotonic()
    try:
        info = rpc.start(request)
        core = f"{info.core_type} {info.core_version}"
        say("backend", f"{core} on 127.0.0.1:{port}, started over gRPC in {_since(began)}")
        yield
    finally:
        rpc.stop()


@contextmanager
def _client(settings: Settings, shown: Shown, port: int, person: TestUser) -> Iterator[int]:
    """Run a second core as the user's client. Yields its SOCKS port."""
    core = shown.core
    executable = install.find(core, settings.cores.get(core.variable("EXECUTABLE_PATH")))
    if executable is None:
        raise Failed(f"no {core.title} found for the client: run `python -m drivers.install {core.name}`")
    socks = free_port()
    command = leashed([str(executable), *shown.arguments])
    with Child(command, ENVIRONMENT, stdin=shown.client(socks, port, person)) as client:
        client.ready(lambda: accepts(socks), 10, f"the client's {core.title} listens")
        yield socks


def _change(rpc: RpcController, socks: int, destination: EchoServer, request: Backend) -> None:
    """Change the configuration while the user downloads, and check that the download goes on."""
    size = 0
    with transfer.connect(socks, destination) as link, ThreadPoolExecutor(1) as pool:
        change = pool.submit(rpc.start, request)
        try:
            while not change.done():
                transfer.download(link, PIECE)
                size += PIECE
            transfer.download(link, PIECE)
        except OSError:
            change.result()
            warnings = rpc.info().warnings
            if not warnings:
                raise
            say("changed", f"the configuration; this ended the download: {'; '.join(warnings)}")
            return
        change.result()
    say("changed", f"the configuration, during a download of {size + PIECE:,} bytes, all of which arrived")


def _send(rpc: RpcController, socks: int, destination: EchoServer, person: TestUser) -> None:
    """Upload all bytes, in two halves: between them the user is connected, and so online."""
    with transfer.connect(socks, destination) as link:
        began = time.monotonic()
        transfer.upload(link, SIZE // 2)
        addresses = rpc.online_ips(person.email).ips
        transfer.upload(link, SIZE - SIZE // 2)
    say("sent", f"{SIZE:,} bytes, all of which arrived, in {_since(began)}")
    say("online", f"{person.email} from {', '.join(addresses) or 'no address'}, meanwhile")


def _print_counted(rpc: RpcController, person: TestUser) -> None:
    """Print the counted bytes and reset them, so that no controller bills them."""
    # The core may count a byte a moment after it arrived.
    with suppress(AssertionError):
        until(lambda: _counted(rpc, person)["uplink"] >= SIZE, COUNTING, "all bytes counted")
    counted = _counted(rpc, person, reset=True)
    say("counted", f"{person.email}: {counted['uplink']:,} bytes up, {counted['downlink']:,} bytes down")
    if counted["uplink"] < SIZE:
        raise Failed(f"the node counted only {counted['uplink']:,} of {SIZE:,} bytes")


def _counted(rpc: RpcController, person: TestUser, reset: bool = False) -> dict[str, int]:
    return {stat.type: stat.value for stat in rpc.stats(UserStat, person.email, reset=reset).stats}


def _print_log(node: Address) -> None:
    lines = RestController(node).tail(QUIET)[-LOG_LINES:]
    for label, line in zip(["log"] + [""] * LOG_LINES, lines, strict=False):
        say(label, line)


def print_usage(settings: Settings) -> None:
    """Print how to call the node, in four lines."""
    host, rest, rpc = _host(settings), settings.door.rest_port, settings.door.grpc_port
    addresses = [f"REST https://{host}:{rest}"] * (rest is not None) + [f"gRPC {host}:{rpc}"] * (rpc is not None)
    key = next(_key_files(settings), None)
    secret = f"$(cat {shlex.quote(str(key))})" if key else "$API_KEY"
    # The reply is a Protocol Buffers message; this prints its texts and drops the bytes between them.
    curl = (
        f'curl -sS --cacert {shlex.quote(str(settings.door.cert_file))} -H "Authorization: Bearer {secret}" '
        f"https://{host}:{rest}/info | tr -cs '[:alnum:] ._-' '\\n'"
    )
    print("\nThe node is ready", flush=True)
    say("addresses", ", ".join(addresses))
    say("files", f"key {_path(key) if key else 'as set in API_KEY'}, certificate {_path(settings.door.cert_file)}")
    say("try", curl if rest is not None else "REST is off: see docs/interface.md for gRPC")
    say("stop", "Ctrl-C")


def _key_files(settings: Settings) -> Iterator[Path]:
    """The files that have the key in use."""
    for name in (os.environ.get("API_KEY_FILE"), settings.state.dir / "api_key"):
        if name and Path(name).is_file() and Path(name).read_text().strip() == settings.keys.key:
            yield Path(name).absolute()


def _host(settings: Settings) -> str:
    """The node's host in an address."""
    host = settings.door.own_address
    return f"[{host}]" if ":" in host else host


def _path(path: Path) -> str:
    """The path, relative if it is below the current directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.2f} s"


def _terminated(*_: object) -> None:
    """End as by an error on TERM, so that the demonstration cleans up."""
    raise SystemExit(128 + signal.SIGTERM)


def main(arguments: Sequence[str]) -> None:
    """The command. Ends the process with what went wrong."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        show(int(arguments[0]), arguments[1], arguments[2])
    except BadSettings as bad:
        raise SystemExit("\n".join(f"txnode cannot start: {fault}" for fault in bad.faults))
    except (AssertionError, ControllerError, Failed, NodeError, OSError, install.InstallError) as error:
        raise SystemExit(f"The demonstration failed: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
