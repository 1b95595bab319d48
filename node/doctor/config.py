"""Reads the ports and REALITY destinations of a core's configuration (Xray or sing-box). Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Most ports of an inbound that are checked.
RANGE = 32
# Values for all addresses of the machine.
ANY = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not listened on
_UDP = ("hysteria", "hysteria2", "tuic", "wireguard", "kcp", "mkcp", "quic")


@dataclass(frozen=True)
class Inbound:
    """An inbound: its host and ports, and whether it listens by UDP alone."""

    tag: str
    host: str
    ports: tuple[int, ...]
    udp: bool


@dataclass(frozen=True)
class Listening:
    """The inbounds of a configuration, and its REALITY destinations as host and port."""

    inbounds: tuple[Inbound, ...] = ()
    destinations: tuple[tuple[str, int], ...] = ()


def read(text: str) -> Listening:
    """Parse a configuration. Raises `ValueError` if it is not plain JSON."""
    document = json.loads(text)
    found = document.get("inbounds") if isinstance(document, dict) else None
    inbounds = [inbound for inbound in found or () if isinstance(inbound, dict)]
    listening = [_inbound(number, inbound) for number, inbound in enumerate(inbounds)]
    shown = {name for inbound in inbounds for name in _destinations(inbound)}
    return Listening(tuple(each for each in listening if each.ports), tuple(sorted(shown)))


def _inbound(number: int, inbound: Mapping[str, Any]) -> Inbound:
    stream = inbound.get("streamSettings")
    network = stream.get("network") if isinstance(stream, dict) else ""
    names = {str(inbound.get("protocol") or inbound.get("type") or "").lower(), str(network).lower()}
    host = str(inbound.get("listen") or "")
    ports = () if host.startswith(("/", "@")) else _ports(inbound.get("port", inbound.get("listen_port")))
    return Inbound(str(inbound.get("tag") or f"inbound {number}"), host, ports, bool(names & set(_UDP)))


def _ports(value: Any) -> tuple[int, ...]:
    """Parse a number, or a text with numbers and ranges."""
    found: list[int] = []
    for part in str(value if value is not None else "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isascii() and first.isdigit() and (not last or (last.isascii() and last.isdigit())):
            found += range(int(first), min(int(last or first), int(first) + RANGE - 1) + 1)
    return tuple(port for port in found if 0 < port < 65_536)[:RANGE]


def _destinations(inbound: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    match inbound:
        case {"streamSettings": {"realitySettings": {"target": target} | {"dest": target}}}:
            host, _, port = str(target).rpartition(":")
            if port.isascii() and port.isdigit():
                yield host.strip("[]") or "127.0.0.1", int(port)
        case {"tls": {"reality": {"handshake": {"server": str(host), "server_port": int(port)}}}}:
            yield host, port
