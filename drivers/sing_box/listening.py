"""What a configuration of sing-box listens on, and what of it one process at a time can have. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from drivers.process.exclusive import interface, wireguard

Json = dict[str, Any]

# What of an inbound says on which socket it listens.
_SOCKET = ("listen", "bind_interface", "netns", "routing_mark", "tcp_multi_path")
# Types that take UDP alone, and have sessions there, …
_QUIC = ("hysteria", "hysteria2", "tuic")
# … those that take TCP and UDP if their `network` does not say otherwise.
_BOTH = ("shadowsocks", "direct", "naive", "tproxy")
# … and those whose datagrams stand for themselves.
_APART = ("shadowsocks", "direct")


def listens(tree: Json) -> Mapping[int, frozenset[str]]:
    """By port how inbounds listen there."""
    found: dict[int, frozenset[str]] = {}
    for inbound in _bound(tree):
        here = json.dumps({key: inbound.get(key) for key in _SOCKET})
        found[inbound["listen_port"]] = found.get(inbound["listen_port"], frozenset()) | {here}
    return found


def taken_twice(tree: Json) -> Iterator[tuple[Json, Json]]:
    """Inbounds at one address: the kernel would give what comes there to either of them."""
    taken: dict[tuple[str, int, str], Json] = {}
    for inbound in _bound(tree):
        for network in _networks(inbound):
            other = taken.setdefault((inbound.get("listen", ""), inbound["listen_port"], network), inbound)
            if other is not inbound:
                yield other, inbound


def tcp(tree: Json) -> list[Json]:
    """The inbounds that take TCP."""
    return [inbound for inbound in _bound(tree) if "tcp" in _networks(inbound)]


def shared(tree: Json) -> frozenset[str]:
    """Inbounds where a connection may be of others than one user.

    It may carry many requests, a reverse proxy's those of many users; and who is nobody's user is led to a fallback.
    """
    return frozenset(inbound["tag"] for inbound in _bound(tree) if _is_shared(inbound))


def _is_shared(inbound: Json) -> bool:
    many = (inbound.get("transport") or {}).get("type") in ("http", "grpc")
    return many or bool(inbound.get("fallback") or inbound.get("fallback_for_alpn"))


def datagrams(tree: Json) -> frozenset[int]:
    """The ports where datagrams stand for themselves, if any come."""
    return frozenset(inbound["listen_port"] for inbound in _bound(tree) if inbound["type"] in _APART)


def sessions(tree: Json) -> frozenset[int]:
    """The ports where clients have sessions by UDP, if any come by that."""
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
    """Network interfaces, keys of peers, ports of services, and `directories` that a core keeps things in, in words."""
    for endpoint in tree.get("endpoints", []):
        tag, kind = endpoint["tag"], endpoint.get("type")
        yield wireguard(tag) if kind == "wireguard" else f"the {kind} endpoint {tag!r} can be live in one process only"
    for inbound in tree.get("inbounds", []):
        if inbound["type"] == "tun":
            yield interface(inbound["tag"])
    # Some listen without saying where: resolved has a port of its own.
    for service in tree.get("services", []):
        yield f"the service {service.get('type')} can be in one process at a time"
    if _keeps({kind: some for kind, some in tree.items() if kind != "endpoints"}, directories):
        yield "certificates by ACME, or what else the core keeps on disk, one process at a time can have"


def _keeps(value: Any, directories: Collection[str]) -> bool:
    """Whether something in it has a directory of its own."""
    if isinstance(value, dict):
        return any(key in directories for key in value) or any(_keeps(some, directories) for some in value.values())
    return isinstance(value, list) and any(_keeps(some, directories) for some in value)
