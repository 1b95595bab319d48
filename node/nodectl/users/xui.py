"""Users in inbounds as 3x-ui exports them: clients in the settings of each. An Xray configuration has them likewise.

A client of several inbounds, by their e-mail, becomes one user with all of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from node.nodectl.users.supply import Entry
from protos import service_pb2 as pb

# An inbound, and a client in it.
_Part = tuple[dict[str, Any], dict[str, Any]]
# By protocol, the credentials of a client: their field, and the proxy and field that it sets.
_FIELDS = {
    "vless": (("id", "vless", "id"), ("flow", "vless", "flow")),
    "vmess": (("id", "vmess", "id"),),
    "trojan": (("password", "trojan", "password"),),
    "shadowsocks": (("password", "shadowsocks", "password"), ("method", "shadowsocks", "method")),
    "hysteria": (("auth", "hysteria", "auth"),),
    "hysteria2": (("auth", "hysteria", "auth"),),
}


def inbounds_of(document: Any) -> list[dict[str, Any]]:
    """The inbounds of a document: an inbound, an array of them, or a configuration; empty if it has another shape."""
    if isinstance(document, dict) and isinstance(document.get("inbounds"), list) and "users" not in document:
        document = document["inbounds"]
    found = document if isinstance(document, list) else [document]
    return found if all(map(_is_inbound, found)) else []


def _is_inbound(value: Any) -> bool:
    return isinstance(value, dict) and "settings" in value and isinstance(value.get("protocol"), str)


def entries(inbounds: Sequence[dict[str, Any]], now: float) -> Iterator[tuple[str, Callable[[], Entry]]]:
    """The clients of these inbounds, by name. Raises `ValueError` for settings without clients."""
    found: dict[str, list[_Part]] = {}
    for number, inbound in enumerate(inbounds, 1):
        for client in _clients(number, inbound):
            name = client.get("email")
            if not isinstance(name, str) or not name:
                raise ValueError(f"inbound {number}: a client has no email")
            found.setdefault(name, []).append((inbound, client))
    for name, parts in found.items():
        yield name, partial(_entry, name, parts, now)


def _entry(name: str, parts: Sequence[_Part], now: float) -> Entry:
    """The user of a client in these inbounds. Raises `ValueError`."""
    user, offs = pb.User(email=name), set[str]()
    for inbound, client in parts:
        off = _off(inbound, client, now)
        offs.add(off)
        if not off:
            _join(user, inbound, client)
    user.inbounds.sort()
    # The user is left out only if they are off in all inbounds.
    return Entry(user, "" if "" in offs else max(offs))


def _clients(number: int, inbound: dict[str, Any]) -> list[dict[str, Any]]:
    settings = inbound["settings"]
    try:
        settings = json.loads(settings) if isinstance(settings, str) and settings else settings or {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"inbound {number}: its settings are not JSON: {error}") from error
    clients = settings.get("clients") or [] if isinstance(settings, dict) else None
    if not isinstance(clients, list) or not all(isinstance(client, dict) for client in clients):
        raise ValueError(f"inbound {number}: its settings have no clients")
    return clients if inbound["protocol"] in _FIELDS else []


def _join(user: pb.User, inbound: dict[str, Any], client: dict[str, Any]) -> None:
    for name, proxy, place in _FIELDS[inbound["protocol"]]:
        value = client.get(name) or ""
        if not isinstance(value, str):
            raise ValueError(f"{name} is not a string")
        message = getattr(user.proxies, proxy)
        if value and getattr(message, place) not in ("", value):
            raise ValueError(f"{user.email} has two different {proxy} {place}s: a user of a node has one")
        if value:
            setattr(message, place, value)
    tag = inbound.get("tag")
    if isinstance(tag, str) and tag and tag not in user.inbounds:
        user.inbounds.append(tag)


def _off(inbound: dict[str, Any], client: dict[str, Any], now: float) -> str:
    if inbound.get("enable") is False or client.get("enable") is False:
        return "disabled"
    expiry = client.get("expiryTime") or 0
    if isinstance(expiry, bool) or not isinstance(expiry, int | float):
        raise ValueError("expiryTime is not a number")
    # In milliseconds. Below 0: a duration that begins with the first connection.
    return "expired" if 0 < expiry <= now * 1000 else ""
