"""A server, the machines around it and a proxied user's probes, in network namespaces of their own.

`python -m tests.harness.town KINDS CORE SETTING=VALUE ...` prints, as JSON, which probes have reached a target by each
kind of inbound. The other machines (`far`) are in a second namespace behind a pair of interfaces: one that users may
reach, a cloud's metadata service, and a DNS server. Nothing leaves these namespaces. It needs util-linux and iproute2,
and no rights where the kernel lets users have namespaces; where it does not, only root's tests run.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from scripts.staging import certs, socks
from scripts.staging.backend import user
from scripts.staging.controller import RestController
from scripts.staging.core import XrayClient
from scripts.staging.cover import CoverServer
from scripts.staging.inbounds import SERVER_NAME, kinds
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import tied
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.harness.grounds import GROUNDS
from tests.harness.warned import warned

_ROOT = Path(__file__).parents[2]
_WITHIN = ("unshare", "--user", "--map-root-user", "--net", "--mount")
OWN, ALLOWED, METADATA = "192.0.2.10", "198.51.100.7", "169.254.169.254"
# A DNS server of the server's own, as systemd-resolved.
RESOLVER = "127.0.0.53"
# The port of the targets: services that the server has for itself, and those of the other machines.
PORT = 7070
NAMES: Mapping[str, tuple[str, ...]] = {
    "allowed.test": (ALLOWED,),
    "loop.test": ("127.0.0.1",),
    "zero.test": ("0.0.0.0",),
    "meta.test": (METADATA,),
    "six.test": ("::1",),
    "mapped.test": ("::ffff:127.0.0.1",),
    "mixed.test": (ALLOWED, "127.0.0.1"),
    # One address for each question, in turn.
    "rebind.test": (ALLOWED, "127.0.0.1"),
}
# Targets that a user may reach, and those that they may not, by TCP and as the first target of UDP.
OPEN = (ALLOWED, "allowed.test")
CLOSED = (
    *("127.0.0.1", "127.0.0.9", "0.0.0.0", "::1", "::ffff:127.0.0.1", METADATA, "localhost", "loop.test", "LOOP.test."),
    *("zero.test", "meta.test", "six.test", "mapped.test", "rebind.test", "127.1", "2130706433"),
)
# Later targets of a UDP session that began with an allowed one. The metadata service of clouds speaks TCP only.
LATER = ("127.0.0.1", "loop.test", "::1")
# Addresses with a zone, as names: Xray's client sends none, but users may have another one.
ZONED = ("::1%lo", "[::1%lo]", "::ffff:127.0.0.1%lo", f"::ffff:{METADATA}%out0")
# The kind of inbound that needs no client core.
PLAIN = "vless-raw"
_SECONDS = 2.0


class Targets:
    """Services on these addresses, TCP and UDP: they answer what they get behind their name, and keep it."""

    def __init__(self, name: str, *addresses: str) -> None:
        self.seen: set[bytes] = set()
        self._name = name.encode() + b" "
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, PORT), family=family, backlog=256)
            datagrams = socket.socket(family, socket.SOCK_DGRAM)
            if family == socket.AF_INET6:
                datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            datagrams.bind((address, PORT))
            for work in (self._accept, listener), (self._echo, datagrams):
                threading.Thread(target=work[0], args=work[1:], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            link, _ = listener.accept()
            threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            while data := link.recv(4096):
                self.seen.add(data)
                link.sendall(self._name + data)

    def _echo(self, datagrams: socket.socket) -> None:
        while True:
            data, peer = datagrams.recvfrom(4096)
            self.seen.add(data)
            datagrams.sendto(self._name + data, peer)


def far() -> None:
    """The other machines: reads a line when the interface is there, prints one when they serve."""
    sys.stdin.readline()
    _ip("link set lo up", "link set in0 up", "addr add 192.0.2.1/24 dev in0", "addr add 2001:db8::1/64 dev in0 nodad")
    _ip(f"addr add {ALLOWED}/32 dev lo", f"addr add {METADATA}/32 dev lo")
    Targets("allowed", ALLOWED)
    Targets("metadata", METADATA)
    threading.Thread(target=_serve_names, args=(ALLOWED,)).start()
    print("ready", flush=True)


def _serve_names(address: str) -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))
    asked: dict[str, int] = {}
    while True:
        question, peer = server.recvfrom(4096)
        server.sendto(_dns_answer(question, asked), peer)


def _dns_answer(question: bytes, asked: dict[str, int]) -> bytes:
    labels, at = [], 12
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode())
        at += 1 + question[at]
    kind = int.from_bytes(question[at + 1 : at + 3], "big")
    name = ".".join(labels).lower()
    some = [ip_address(one) for one in NAMES.get(name, ())]
    if name == "rebind.test" and kind == 1:
        asked[name] = asked.get(name, -1) + 1
        some = [some[asked[name] % 2]]
    found = [one for one in some if (one.version == 4) == (kind == 1) and kind in (1, 28)]
    answers = b"".join(
        b"\xc0\x0c" + question[at + 1 : at + 5] + bytes(4) + len(one.packed).to_bytes(2, "big") + one.packed
        for one in found
    )
    flags = b"\x81\x80" if name in NAMES else b"\x81\x83"
    return question[:2] + flags + b"\0\1" + len(found).to_bytes(2, "big") + bytes(4) + question[12 : at + 5] + answers


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def _build(stack: ExitStack, directory: Path) -> Targets:
    """Set up both namespaces; this process is the server's."""
    there = tied(
        ["unshare", "--net", sys.executable, "-m", __spec__.name, "far"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
    )
    stack.callback(there.kill)
    here = Path("/proc/self/ns/net").readlink()
    until(lambda: Path(f"/proc/{there.pid}/ns/net").readlink() != here, what="the other machines have a namespace")
    _ip("link set lo up", f"link add out0 type veth peer name in0 netns {there.pid}", "link set out0 up")
    _ip(f"addr add {OWN}/24 dev out0", "addr add 2001:db8::10/64 dev out0 nodad")
    _ip("route add default via 192.0.2.1", "-6 route add default via 2001:db8::1")
    resolver = directory / "resolv.conf"
    resolver.write_text(f"nameserver {ALLOWED}\noptions timeout:1 attempts:2\n")
    subprocess.run(["mount", "--bind", str(resolver), "/etc/resolv.conf"], check=True)
    assert there.stdin and there.stdout
    there.stdin.write("\n")
    there.stdin.flush()
    assert there.stdout.readline() == "ready\n", "the other machines do not serve"
    threading.Thread(target=_serve_names, args=(RESOLVER,), daemon=True).start()
    Targets("own", OWN)
    return Targets("loopback", "127.0.0.1", "127.0.0.9", "::1")


def _tcp(port: int, host: str, token: bytes) -> str:
    """Who answers; empty if no machine does."""
    with suppress(OSError), socks.connect(port, host, PORT, _SECONDS, first=token) as link:
        return _answered(link.recv(4096), token)
    return ""


def _plain(port: int, person: TestUser, host: str, token: bytes) -> str:
    """As `_tcp`, by plain VLESS without a client core."""
    there = struct.pack("!HBB", PORT, 2, len(host)) + host.encode()
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), _SECONDS) as link:
        link.sendall(b"\0" + uuid.UUID(person.uuid).bytes + b"\0\1" + there + token)
        answer = b""
        while len(answer) < 2 + len(token) and (data := link.recv(4096)):
            answer += data
        return _answered(answer[2:], token)
    return ""


def _answered(data: bytes, token: bytes) -> str:
    name, _, rest = data.partition(b" ")
    assert not data or rest == token, f"{data!r} is no answer to {token!r}"
    return name.decode()


def _udp(port: int, token: bytes, *hosts: str) -> str:
    """Send the token to the last of these hosts, in one session that begins with the others. Who answers?"""
    with suppress(OSError), socks.UdpAssociation(port, _SECONDS) as association:
        for host in hosts[:-1]:
            for _ in range(3):
                association.send(first := uuid.uuid4().hex.encode(), host, PORT)
                with suppress(TimeoutError):
                    if _answered(association.receive(), first):
                        break
            else:
                raise AssertionError(f"a user does not reach {host} by UDP")
        association.send(token, hosts[-1], PORT)
        return _answered(association.receive(), token)
    return ""


def _node(port: int, host: str, node_port: int) -> str:
    """Ask for TLS at the node's own port. Who answers?"""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    with suppress(OSError), socks.connect(port, host, node_port, _SECONDS, first=outgoing.read()) as link:
        return "node" if link.recv(1) else ""
    return ""


def probes(port: int, node_port: int) -> dict[str, Callable[[bytes], str]]:
    """All probes through a SOCKS port, by name."""
    found: dict[str, Callable[[bytes], str]] = {}
    for host in (*OPEN, *CLOSED, "mixed.test", OWN):
        found[f"tcp {host}"] = lambda token, host=host: _tcp(port, host, token)  # type: ignore[misc]
        found[f"udp {host}"] = lambda token, host=host: _udp(port, token, host)  # type: ignore[misc]
    for host in LATER:
        found[f"later {host}"] = lambda token, host=host: _udp(port, token, ALLOWED, host)  # type: ignore[misc]
    found["later allowed"] = lambda token: _udp(port, token, ALLOWED, ALLOWED)
    for host in ("127.0.0.1", OWN):
        found[f"node {host}"] = lambda _, host=host: _node(port, host, node_port)  # type: ignore[misc]
    return found


def _plain_probes(port: int, person: TestUser) -> dict[str, Callable[[bytes], str]]:
    """Those that need no client core, through a VLESS inbound."""
    hosts = *OPEN, *ZONED
    return {f"plain {host}": lambda token, host=host: _plain(port, person, host, token) for host in hosts}  # type: ignore[misc]


def _probe(some: Mapping[str, Callable[[bytes], str]], here: Targets) -> dict[str, str]:
    """Which machine each probe reaches: it gets an answer, or a service of the server has seen it."""
    tokens = {name: uuid.uuid4().hex.encode() for name in some}
    with ThreadPoolExecutor(len(tokens)) as pool:
        answered = {name: pool.submit(probe, tokens[name]) for name, probe in some.items()}
    return {name: "loopback" if tokens[name] in here.seen else each.result() for name, each in answered.items()}


def measure(names: Iterable[str], core: str, settings: Mapping[str, str], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Run the node with these settings in the town. Returns what each kind of inbound reaches, and `info`."""
    ground = next(each for each in GROUNDS if each.name == core)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        here = _build(stack, directory)
        cover = stack.enter_context(CoverServer(directory))
        some = kinds(certs.make(directory, [SERVER_NAME]), cover.port)
        places = {name: (some[name], free_port()) for name in names}
        node = stack.enter_context(NodeProcess(directory, NODE_HOST="", **settings))
        controller = RestController(node)
        stack.callback(controller.close)
        person = TestUser.new("proxied@test")
        inbounds = [ground.inbound(kind, port, name) for name, (kind, port) in places.items()]
        member = user(person, {name: kind for name, (kind, _) in places.items()})
        info = controller.start(ground.backend(inbounds, [member], **extra))
        routes = {free_port(): (name, *place) for name, place in places.items()}
        outbounds = {here_port: kind.outbound(port, person) for here_port, (_, kind, port) in routes.items()}
        stack.enter_context(XrayClient(outbounds))
        reached = {name: _probe(probes(port, node.rest_port), here) for port, (name, *_) in routes.items()}
        if PLAIN in places:
            reached[PLAIN] |= _probe(_plain_probes(places[PLAIN][1], person), here)
        return {"reached": reached, "warnings": warned(info), "notes": [*info.notes]}


@cache
def _obstacle() -> str:
    """Why there can be no namespaces, or nothing: AppArmor, sysctls and container engines forbid them."""
    made = subprocess.run([*_WITHIN, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    return made.stderr.strip() if made.returncode else ""


def visit(names: Iterable[str], core: str, extra: Mapping[str, Any] | None = None, **settings: str) -> dict[str, Any]:
    """Run `measure` in new namespaces. Raises `AssertionError` with the output if it fails."""
    if os.geteuid() != 0 and (obstacle := _obstacle()):
        pytest.skip(f"this user may not have network namespaces ({obstacle}): root runs these tests")
    asked = json.dumps([[*names], core, settings, extra or {}])
    process = tied(
        [*_WITHIN, sys.executable, "-m", "tests.harness.town", asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
    )
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, f"{output}\n{errors}"
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return print(output) or found


if __name__ == "__main__":
    if sys.argv[1] == "far":
        far()
    else:
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
