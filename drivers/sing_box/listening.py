"""Where the inbounds of a sing-box configuration listen, and which parts only one process can have. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivers.process.generation import only_interface, only_wireguard
from drivers.process.json_text import Json
from drivers.sing_box.overrides import DIRECTORIES

# The options of an inbound that determine its socket.
_SOCKET = ("listen", "bind_interface", "netns", "routing_mark", "tcp_multi_path")
# Types that use UDP only, with sessions, …
_QUIC = ("hysteria", "hysteria2", "tuic")
# … types that use TCP and UDP unless their `network` names one, …
_BOTH = ("shadowsocks", "direct", "naive", "tproxy")
# … and types whose datagrams are independent of each other.
_APART = ("shadowsocks", "direct")
# Types of which users' bytes are in one TCP connection each; and words for others in the bill.
_PLAIN = ("vless", "vmess", "trojan", "shadowsocks", "socks", "http", "mixed", "direct", "redirect", "tproxy")
_NAMED = {"ws": "websocket", "httpupgrade": "websocket", "hysteria2": "hysteria"}
# Transports that carry many requests over one connection.
_MANY = ("http", "grpc")


@dataclass(frozen=True)
class Listens:
    """Where the inbounds of a configuration listen. Satisfies `drivers.process.generation.Listening`."""

    tree: Json

    @property
    def bound(self) -> list[Json]:
        """The inbounds that listen on a port."""
        return [inbound for inbound in self.tree.get("inbounds", []) if inbound.get("listen_port")]

    @property
    def ports(self) -> list[range]:
        return [range(inbound["listen_port"], inbound["listen_port"] + 1) for inbound in self.bound]

    @property
    def listens(self) -> Mapping[int, frozenset[str]]:
        found: dict[int, frozenset[str]] = {}
        for inbound in self.bound:
            here = json.dumps({key: inbound.get(key) for key in _SOCKET})
            found[inbound["listen_port"]] = found.get(inbound["listen_port"], frozenset()) | {here}
        return found

    @property
    def datagrams(self) -> frozenset[int]:
        return frozenset(inbound["listen_port"] for inbound in self.bound if inbound["type"] in _APART)

    @property
    def sessions(self) -> frozenset[int]:
        some = (inbound for inbound in self.bound if _is_quic(inbound) or inbound["type"] == "naive")
        return frozenset(inbound["listen_port"] for inbound in some)

    @property
    def exclusive(self) -> Sequence[str]:
        return list(_exclusive(self.tree))

    @property
    def tcp(self) -> list[Json]:
        """The inbounds that accept TCP."""
        return [inbound for inbound in self.bound if "tcp" in _networks(inbound)]

    def taken_twice(self) -> Iterator[tuple[Json, Json]]:
        """Pairs of inbounds with the same address: the kernel would give connections to either of them."""
        taken: dict[tuple[str, int, str], Json] = {}
        for inbound in self.bound:
            for network in _networks(inbound):
                other = taken.setdefault((inbound.get("listen", ""), inbound["listen_port"], network), inbound)
                if other is not inbound:
                    yield other, inbound

    @property
    def shared(self) -> frozenset[str]:
        """The tags of inbounds where a connection may belong to several users, or to none.

        A connection that carries many requests may be a reverse proxy's, with those of many users; and connections
        without a credential go to a fallback.
        """
        return frozenset(inbound["tag"] for inbound in self.bound if _is_shared(inbound))

    @property
    def transports(self) -> frozenset[str]:
        """How users connect, in words of `Bill.transports`; "local" behind a server of this machine."""
        return frozenset(map(_transport_of, self.bound))

    @property
    def multiplexed(self) -> frozenset[str]:
        """The tags of TCP inbounds where clients keep connections open, and open streams in them on demand."""
        detours = {inbound["detour"]: inbound for inbound in self.tree.get("inbounds", []) if inbound.get("detour")}
        return frozenset(one["tag"] for one in self.tcp if _keeps_open(one) or _keeps_open(detours.get(one["tag"], {})))


def _transport_of(inbound: Json) -> str:
    kind, tls = str(inbound["type"]), inbound.get("tls") or {}
    transport = str((inbound.get("transport") or {}).get("type") or "")
    if inbound.get("listen", "").startswith(("127.", "::1")):
        return "local"
    if transport or kind not in _PLAIN:
        return _NAMED.get(transport or kind, transport or kind)
    if tls.get("enabled"):
        return "reality" if (tls.get("reality") or {}).get("enabled") else "tls"
    return "shadowsocks" if kind == "shadowsocks" else "tcp"


def _is_shared(inbound: Json) -> bool:
    many = (inbound.get("transport") or {}).get("type") in _MANY
    return many or bool(inbound.get("fallback") or inbound.get("fallback_for_alpn"))


def _keeps_open(inbound: Json) -> bool:
    kept = inbound.get("type") in ("anytls", "naive") or (inbound.get("transport") or {}).get("type") in _MANY
    return kept or bool((inbound.get("multiplex") or {}).get("enabled"))


def _networks(inbound: Json) -> Sequence[str]:
    if _is_quic(inbound):
        return ("udp",)
    if inbound["type"] not in _BOTH:
        return ("tcp",)
    return [network for network in ("tcp", "udp") if network in (inbound.get("network") or ("tcp", "udp"))]


def _is_quic(inbound: Json) -> bool:
    return inbound["type"] in _QUIC or (inbound.get("transport") or {}).get("type") == "quic"


def _exclusive(tree: Json) -> Iterator[str]:
    """Interfaces, peers' keys, services' ports and directories, in words."""
    for endpoint in tree.get("endpoints", []):
        tag, kind = endpoint["tag"], endpoint.get("type")
        yield only_wireguard(tag) if kind == "wireguard" else f"only one process can run the {kind} endpoint {tag!r}"
    for inbound in tree.get("inbounds", []):
        if inbound["type"] == "tun":
            yield only_interface(inbound["tag"])
    # Some services listen on ports that are not in the configuration, such as resolved.
    for service in tree.get("services", []):
        yield f"only one process can run the service {service.get('type')}"
    if _keeps_files({kind: some for kind, some in tree.items() if kind != "endpoints"}):
        yield "only one process can use what the core keeps on disk: ACME certificates and other state"


def _keeps_files(value: Any) -> bool:
    """Whether something in this value names a directory where the core keeps files."""
    if isinstance(value, dict):
        return any(key in DIRECTORIES for key in value) or any(map(_keeps_files, value.values()))
    return isinstance(value, list) and any(map(_keeps_files, value))
