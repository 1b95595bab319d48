"""What a configuration of sing-box listens on, and what of it one process at a time can have. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from drivers.process.exclusive import interface, wireguard

Json = dict[str, Any]

# What of an inbound says on which socket it listens.
_SOCKET = ("listen", "bind_interface", "netns", "routing_mark", "tcp_multi_path")


def listens(tree: Json) -> Mapping[int, Sequence[Json]]:
    """By port how inbounds listen there."""
    found: dict[int, list[Json]] = {}
    for inbound in tree.get("inbounds", []):
        if inbound.get("listen_port"):
            found.setdefault(inbound["listen_port"], []).append({key: inbound.get(key) for key in _SOCKET})
    return {port: sorted(some, key=json.dumps) for port, some in found.items()}


def datagrams(tree: Json, kind: str) -> frozenset[int]:
    """The ports of inbounds of this type, where datagrams stand for themselves, if any come."""
    return frozenset(inbound.get("listen_port", 0) for inbound in tree.get("inbounds", []) if inbound["type"] == kind)


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
