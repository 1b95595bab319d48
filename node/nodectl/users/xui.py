"""Users of inbounds as 3x-ui exports them: clients in the settings of each. A configuration of a core is like it.

Somebody may be a client of several inbounds; they are one user with all of these, by their e-mail.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from node.nodectl.users.supply import Entry
from protos import service_pb2 as pb

# What is a client's credential in an inbound of a protocol: the field of it, and where it goes.
_FIELDS = {
    "vless": (("id", "vless", "id"), ("flow", "vless", "flow")),
    "vmess": (("id", "vmess", "id"),),
    "trojan": (("password", "trojan", "password"),),
    "shadowsocks": (("password", "shadowsocks", "password"), ("method", "shadowsocks", "method")),
    "hysteria": (("auth", "hysteria", "auth"),),
    "hysteria2": (("auth", "hysteria", "auth"),),
}


def inbounds_of(said: Any) -> list[dict[str, Any]]:
    """The inbounds of an export, if it is one: an inbound, several, or a configuration that has them."""
    if isinstance(said, dict) and isinstance(said.get("inbounds"), list) and "users" not in said:
        said = said["inbounds"]
    found = said if isinstance(said, list) else [said]
    return found if all(map(_is_inbound, found)) else []


def _is_inbound(said: Any) -> bool:
    return isinstance(said, dict) and "settings" in said and isinstance(said.get("protocol"), str)


@dataclass
class Client:
    """Somebody in all inbounds in which they are, as they are found."""

    name: str
    _parts: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    now: float = 0

    def add(self, inbound: dict[str, Any], client: dict[str, Any]) -> None:
        self._parts.append((inbound, client))

    def make(self) -> Entry:
        """Raises `ValueError`."""
        user, offs = pb.User(email=self.name), set[str]()
        for inbound, client in self._parts:
            off = _off(inbound, client, self.now)
            offs.add(off)
            if not off:
                _join(user, inbound, client)
        user.inbounds.sort()
        # Who is in one of them is in.
        return Entry(user, "" if "" in offs else max(offs))


def entries(inbounds: Sequence[dict[str, Any]], now: float) -> Iterator[Client]:
    """Everybody in them. Raises `ValueError` for settings that have no clients."""
    found: dict[str, Client] = {}
    for number, inbound in enumerate(inbounds, 1):
        for client in _clients(number, inbound):
            name = client.get("email")
            if not isinstance(name, str) or not name:
                raise ValueError(f"inbound {number}: a client has no email")
            found.setdefault(name, Client(name, now=now)).add(inbound, client)
    yield from found.values()


def _clients(number: int, inbound: dict[str, Any]) -> list[dict[str, Any]]:
    settings = inbound["settings"]
    try:
        settings = json.loads(settings) if isinstance(settings, str) and settings else settings or {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"inbound {number}: its settings are no JSON: {error}") from error
    clients = settings.get("clients") or [] if isinstance(settings, dict) else None
    if not isinstance(clients, list) or not all(isinstance(client, dict) for client in clients):
        raise ValueError(f"inbound {number}: its settings have no clients")
    return clients if inbound["protocol"] in _FIELDS else []


def _join(user: pb.User, inbound: dict[str, Any], client: dict[str, Any]) -> None:
    for name, proxy, place in _FIELDS[inbound["protocol"]]:
        value = client.get(name) or ""
        if not isinstance(value, str):
            raise ValueError(f"{name} is no text")
        message = getattr(user.proxies, proxy)
        if value and getattr(message, place) not in ("", value):
            raise ValueError(f"{user.email} has two {proxy} {place}s, one an inbound: on a node a user has one")
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
        raise ValueError("expiryTime is no number")
    # In milliseconds; less than 0 is a time that begins with the first connection.
    return "expired" if 0 < expiry <= now * 1000 else ""
