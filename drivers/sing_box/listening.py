"""Where the inbounds of a sing-box configuration listen, and which parts only one process can have. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from drivers.process.exclusive import interface, wireguard

Json = dict[str, Any]

# The options of an inbound that determine its socket.
_SOCKET = ("listen", "bind_interface", "netns", "routing_mark", "tcp_multi_path")
# Types that use UDP only, with sessions, …
_QUIC = ("hysteria", "hysteria2", "tuic")
# … types that use TCP and UDP unless their `network` names one, …
_BOTH = ("shadowsocks", "direct", "naive", "tproxy")
# … and types whose datagrams are independent of each other.
_APART = ("shadowsocks", "direct")
# Transports that carry many requests over one connection.
_MANY = ("http", "grpc")


def listens(tree: Json) -> Mapping[int, frozenset[str]]:
    """Map each port to the socket options of the inbounds there."""
    found: dict[int, frozenset[str]] = {}
    for inbound in _bound(tree):
        here = json.dumps({key: inbound.get(key) for key in _SOCKET})
        found[inbound["listen_port"]] = found.get(inbound["listen_port"], frozenset()) | {here}
    return found


def taken_twice(tree: Json) -> Iterator[tuple[Json, Json]]:
    """Yield pairs of inbounds with the same address: the kernel would give connections to either of them."""
    taken: dict[tuple[str, int, str], Json] = {}
    for inbound in _bound(tree):
        for network in _networks(inbound):
            other = taken.setdefault((inbound.get("listen", ""), inbound["listen_port"], network), inbound)
            if other is not inbound:
                yield other, inbound


def tcp(tree: Json) -> list[Json]:
    """Return the inbounds that accept TCP."""
    return [inbound for inbound in _bound(tree) if "tcp" in _networks(inbound)]


def shared(tree: Json) -> frozenset[str]:
    """Return the tags of inbounds where a connection may belong to several users, or to none.

    A connection that carries many requests may be a reverse proxy's, with those of many users; and connections without
    a credential go to a fallback.
    """
    return frozenset(inbound["tag"] for inbound in _bound(tree) if _is_shared(inbound))


def _is_shared(inbound: Json) -> bool:
    many = (inbound.get("transport") or {}).get("type") in _MANY
    return many or bool(inbound.get("fallback") or inbound.get("fallback_for_alpn"))


def multiplexed(tree: Json) -> frozenset[str]:
    """Return the tags of TCP inbounds where clients keep connections open and open streams in them on demand."""
    detours = {inbound["detour"]: inbound for inbound in tree.get("inbounds", []) if inbound.get("detour")}
    return frozenset(one["tag"] for one in tcp(tree) if _keeps_open(one) or _keeps_open(detours.get(one["tag"], {})))


def _keeps_open(inbound: Json) -> bool:
    kept = inbound.get("type") in ("anytls", "naive") or (inbound.get("transport") or {}).get("type") in _MANY
    return kept or bool((inbound.get("multiplex") or {}).get("enabled"))


def datagrams(tree: Json) -> frozenset[int]:
    """Return the UDP ports where each datagram is independent of the others."""
    return frozenset(inbound["listen_port"] for inbound in _bound(tree) if inbound["type"] in _APART)


def sessions(tree: Json) -> frozenset[int]:
    """Return the UDP ports where clients have sessions."""
    some = (inbound for inbound in _bound(tree) if _is_quic(inbound) or inbound["type"] == "naive")
    return frozenset(inbound["listen_port"] for inbound in some)


def _bound(tree: Json) -> Iterator[Json]:
    return (inbound for inbound in tree.get("inbounds", []) if inbound.get("listen_port"))


def _networks(inbound: Json) -> Sequence[str]:
    if _is_quic(inbound):
        return ("udp",)
    if inbound["type"] not in _BOTH:
        return ("tcp",)
    return [network for network in ("tcp", "udp") if network in (inbound.get("network") or ("tcp", "udp"))]


def _is_quic(inbound: Json) -> bool:
    return inbound["type"] in _QUIC or (inbound.get("transport") or {}).get("type") == "quic"


def exclusive(tree: Json, directories: Collection[str]) -> Iterator[str]:
    """Yield, in words, what only one process can have: interfaces, peers' keys, services' ports, `directories`."""
    for endpoint in tree.get("endpoints", []):
        tag, kind = endpoint["tag"], endpoint.get("type")
        yield wireguard(tag) if kind == "wireguard" else f"only one process can run the {kind} endpoint {tag!r}"
    for inbound in tree.get("inbounds", []):
        if inbound["type"] == "tun":
            yield interface(inbound["tag"])
    # Some services listen on ports that are not in the configuration, such as resolved.
    for service in tree.get("services", []):
        yield f"only one process can run the service {service.get('type')}"
    if _keeps({kind: some for kind, some in tree.items() if kind != "endpoints"}, directories):
        yield "only one process can use what the core keeps on disk: ACME certificates and other state"


def _keeps(value: Any, directories: Collection[str]) -> bool:
    """Whether something in this value names one of the directories' keys."""
    if isinstance(value, dict):
        return any(key in directories for key in value) or any(_keeps(some, directories) for some in value.values())
    return isinstance(value, list) and any(_keeps(some, directories) for some in value)
