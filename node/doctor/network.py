"""Looks up listening ports and firewall rules of this machine, and tries connections and ways, with timeouts."""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path

from node.doctor.config import ANY, Inbound

# Asked without a key, and without a name: the answer does not matter, but that a server dates it.
_QUESTION = b"GET / HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
_DATE = re.compile(rb"^date: *([^\r\n]+)", re.MULTILINE | re.IGNORECASE)
# Timeout in seconds for a connection on this machine, and to another one; most destinations that are tried.
HERE, THERE = 1.0, 3.0
DESTINATIONS = 8
_LISTENS, _BOUND = "0A", "07"
_UFW = re.compile(r"^### tuple ### (?:allow|limit) (\S+) (\S+) ", re.MULTILINE)
_FIREWALLD = re.compile(r'<port\s[^>]*port="([\d-]+)"')


def bound(kind: str, proc: Path = Path("/proc/net")) -> dict[int, set[int]]:
    """The listening TCP ports, or the bound UDP ports, with the inodes of their sockets."""
    found: dict[int, set[int]] = {}
    for name in (kind, f"{kind}6"):
        try:
            lines = (proc / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if words[3] == (_LISTENS if kind == "tcp" else _BOUND):
                found.setdefault(int(words[1].rpartition(":")[2], 16), set()).add(int(words[9]))
    return found


def sockets_of(pid: int | None, proc: Path = Path("/proc")) -> set[int]:
    """The inodes of a process's sockets; empty if they may not be read."""
    found: set[int] = set()
    try:
        files = list((proc / f"{pid}/fd").iterdir()) if pid else []
        for file in files:
            target = str(file.readlink())
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    except OSError:
        return found
    return found


def ports(wanted: Iterable[int], pid: int | None) -> dict[int, str]:
    """For each of the node's ports: "ours", "free", or who has it."""
    listening, own = bound("tcp"), sockets_of(pid)
    return {port: _owner(listening.get(port), own, pid) for port in wanted}


def _owner(sockets: set[int] | None, own: set[int], pid: int | None) -> str:
    if not sockets:
        return "free" if pid is None else "the node does not listen there"
    return "ours" if sockets & own or (pid is not None and not own) else "another program has the port"


def reach(host: str, port: int, seconds: float) -> str:
    """Return why a TCP connection fails, or ""."""
    try:
        socket.create_connection((host, port), seconds).close()
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


@dataclass(frozen=True)
class Way:
    """What is between this machine and a node: faults of the connection, of TLS and of the certificate, or "".

    `code` is OpenSSL's number of the last one, `certificate` what the node shows, and `ahead` by how many seconds its
    clock is ahead.
    """

    connection: str = ""
    tls: str = ""
    refusal: str = ""
    code: int = 0
    certificate: bytes = b""
    http2: bool | None = None
    ahead: float | None = None


def way(host: str, port: int, name: str, trust: bytes | None, seconds: float = THERE) -> Way:
    """Try the way to a node with this name, whose certificate is trusted by `trust`. No key is sent."""
    if fault := reach(host, port, seconds):
        return Way(fault)
    context = ssl.create_default_context(cadata=None if trust is None else trust.decode())
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    tls = partial(_tls, context, (host, port), name, seconds)
    refusal, code = "", 0
    try:
        tls("h2", "http/1.1").close()
    except ssl.SSLCertVerificationError as error:
        refusal, code = error.verify_message, error.verify_code
    except (OSError, ValueError) as error:
        return Way(tls=str(error) or type(error).__name__)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with tls("h2") as link:
            http2 = link.selected_alpn_protocol() == "h2"
    except OSError:  # some servers refuse clients that speak only this
        http2 = False
    try:
        with tls("http/1.1") as link:
            link.sendall(_QUESTION)
            dated = _DATE.search(link.recv(4096))
            ahead = parsedate_to_datetime(dated[1].decode()).timestamp() - time.time() if dated else None
            return Way("", "", refusal, code, link.getpeercert(binary_form=True) or b"", http2, ahead)
    except (OSError, ValueError):
        return Way(refusal=refusal, code=code, http2=http2)


def _tls(
    context: ssl.SSLContext, address: tuple[str, int], name: str, seconds: float, *protocols: str
) -> ssl.SSLSocket:
    context.set_alpn_protocols(protocols)
    return context.wrap_socket(socket.create_connection(address, seconds), server_hostname=name)


def inbounds(found: Iterable[Inbound]) -> dict[str, str]:
    """For each inbound why it accepts no connection, or ""; for one by UDP only whether its port is bound."""
    tcp, udp = bound("tcp"), bound("udp")
    return {inbound.tag: _deaf(inbound, tcp, udp) for inbound in found}


def _deaf(inbound: Inbound, tcp: Mapping[int, object], udp: Mapping[int, object]) -> str:
    for port in inbound.ports:
        if port not in tcp and port not in udp:
            return f"no program listens on port {port}"
        host = "127.0.0.1" if inbound.host in ANY else inbound.host
        if port in tcp and not inbound.udp and (fault := reach(host, port, HERE)):
            return f"port {port} accepts no connection: {fault}"
    return ""


def destinations(found: Iterable[tuple[str, int]]) -> dict[str, str]:
    """For each of the first DESTINATIONS why it cannot be reached, or ""."""
    return {f"{host}:{port}": reach(host, port, THERE) for host, port in list(found)[:DESTINATIONS]}


def closed(wanted: Collection[int], etc: Path = Path("/etc")) -> tuple[str, set[int]] | None:
    """The active firewall and the ports that it blocks; None if no firewall is active, or it cannot be read."""
    try:
        if "ENABLED=yes" in (etc / "ufw/ufw.conf").read_text():
            rules = "\n".join((etc / f"ufw/{name}.rules").read_text() for name in ("user", "user6"))
            return "ufw", shut(wanted, [ports for _, ports in _UFW.findall(rules)])
    except OSError:
        pass
    try:
        zones = "\n".join(file.read_text() for file in (etc / "firewalld/zones").glob("*.xml"))
    except OSError:
        return None
    return ("firewalld", shut(wanted, _FIREWALLD.findall(zones))) if zones else None


def shut(wanted: Collection[int], allowed: Iterable[str]) -> set[int]:
    """The wanted ports that are in none of these numbers and ranges; "any" allows all."""
    left = set(wanted)
    for part in (part for rule in allowed for part in rule.split(",")):
        first, _, last = part.replace(":", "-").partition("-")
        if part == "any":
            return set()
        if first.isdigit():
            left -= set(range(int(first), int(last or first) + 1))
    return left
