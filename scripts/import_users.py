"""Make a users file for nodectl from an export of a panel: `python -m scripts.import_users EXPORT > users.json`.

It reads, and detects by the content: users as Marzban and PasarGuard list them over their interfaces (`username`,
`proxies`, `inbounds`, `status`), and inbounds as 3x-ui exports them, with clients in the settings of each. An Xray
configuration has them likewise. A client of several inbounds, by their e-mail, becomes one user with all of these.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from node.nodectl.output import print_json
from node.nodectl.session import inbound_option
from node.nodectl.users_file import Entry, Supply, load, message_of, place_of, read
from protos import service_pb2 as pb

_UNKNOWN = "no users found in a known shape: a list of users of Marzban or PasarGuard, or inbounds of 3x-ui"
# Statuses of users who may connect. On hold: their time begins with the first connection.
_IN = ("active", "on_hold")
_KINDS = {field.name: field.message_type for field in pb.Proxy.DESCRIPTOR.fields}
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


@click.command
@click.argument("source", metavar="EXPORT", type=click.Path(path_type=Path))
@inbound_option(help="Let users without inbounds in EXPORT into this inbound; may be repeated.")
def main(source: Path, inbounds: tuple[str, ...]) -> None:
    """Print the users in EXPORT, of Marzban, PasarGuard or 3x-ui, as a users file for nodectl."""
    print_json({"users": read(source, inbounds, partial(parse, now=time.time()))})


def parse(text: str, inbounds: Sequence[str], now: float) -> Supply:
    """Parse the users of an export; `now` in Unix seconds. Raises `ValueError` with one fault a line."""
    supply, document = Supply(inbounds), load(text)
    if isinstance(document, dict) and "obj" in document:  # a reply of 3x-ui
        document = document["obj"]
    if found := _inbounds_of(document):
        for name, make in _clients_of(found, now):
            supply.take(partial(place_of, text, 0, name), make)
        return supply.finish()
    users = document.get("users", document.get("items")) if isinstance(document, dict) else document
    if not isinstance(users, list) or not all(isinstance(user, dict) and "username" in user for user in users):
        raise ValueError(_UNKNOWN)
    for number, user in enumerate(users, 1):
        supply.take(partial(place_of, text, number, user["username"]), partial(_listed, user, now))
    return supply.finish()


# Marzban and PasarGuard


def _listed(document: dict[str, Any], now: float) -> Entry:
    """The user, named by `username`. Raises `ValueError`."""
    user = pb.User(email=_text(document, "username"), inbounds=_inbounds(document.get("inbounds")))
    settings = document.get("proxies") or document.get("proxy_settings") or {}
    if not isinstance(settings, dict):
        raise ValueError("proxies is not an object")
    user.proxies.CopyFrom(_proxies(settings))
    return user, _off(document, now)


def _proxies(settings: dict[str, Any]) -> pb.Proxy:
    """The fields that a node knows; others, as a trojan's flow, are dropped."""
    known = {}
    for name, values in settings.items():
        kind = _KINDS.get(str(name).lower())
        if kind is not None and isinstance(values, dict):
            fields = {field.name for field in kind.fields}
            known[kind.name.lower()] = {
                field: "" if value == "none" and field == "flow" else value
                for field, value in values.items()
                if field in fields and value is not None
            }
    return message_of(known, pb.Proxy())


def _inbounds(value: Any) -> list[str]:
    """The tags, from lists by protocol or from one list."""
    if value is None:
        return []
    lists = list(value.values()) if isinstance(value, dict) else [value]
    if not all(isinstance(tags, list) and all(isinstance(tag, str) for tag in tags) for tags in lists):
        raise ValueError("inbounds must contain only tags")
    return sorted({tag for tags in lists for tag in tags})


def _off(document: dict[str, Any], now: float) -> str:
    """Why the user is left out: their status, or that they expired; empty if they are not."""
    status = _text(document, "status", "active").lower()
    if status not in _IN:
        return status
    return "expired" if 0 < _expiry(document.get("expire")) <= now else ""


def _expiry(value: Any) -> float:
    """Parse a time into Unix seconds; 0 means never."""
    try:
        if isinstance(value, str) and value:
            when = datetime.fromisoformat(value)
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        if not isinstance(value, bool | list | dict):
            return float(value or 0)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"expire is {str(value)[:40]!r}, which is not a time") from error
    raise ValueError("expire is not a time")


def _text(document: dict[str, Any], field: str, default: str = "") -> str:
    value = document.get(field, default)
    if not isinstance(value, str):
        raise ValueError(f"{field} is not a string")
    return value


# 3x-ui


def _inbounds_of(document: Any) -> list[dict[str, Any]]:
    """The inbounds of a document: an inbound, an array of them, or a configuration; empty if it has another shape."""
    if isinstance(document, dict) and isinstance(document.get("inbounds"), list) and "users" not in document:
        document = document["inbounds"]
    found = document if isinstance(document, list) else [document]
    return found if all(map(_is_inbound, found)) else []


def _is_inbound(value: Any) -> bool:
    return isinstance(value, dict) and "settings" in value and isinstance(value.get("protocol"), str)


def _clients_of(inbounds: Sequence[dict[str, Any]], now: float) -> Iterator[tuple[str, Callable[[], Entry]]]:
    """The clients of these inbounds, by name. Raises `ValueError` for settings without clients."""
    found: dict[str, list[_Part]] = {}
    for number, inbound in enumerate(inbounds, 1):
        for client in _clients(number, inbound):
            name = client.get("email")
            if not isinstance(name, str) or not name:
                raise ValueError(f"inbound {number}: a client has no email")
            found.setdefault(name, []).append((inbound, client))
    for name, parts in found.items():
        yield name, partial(_joined, name, parts, now)


def _joined(name: str, parts: Sequence[_Part], now: float) -> Entry:
    """The user of a client in these inbounds. Raises `ValueError`."""
    user, offs = pb.User(email=name), set[str]()
    for inbound, client in parts:
        off = _client_off(inbound, client, now)
        offs.add(off)
        if not off:
            _join(user, inbound, client)
    user.inbounds.sort()
    # The user is left out only if they are off in all inbounds.
    return user, "" if "" in offs else max(offs)


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


def _client_off(inbound: dict[str, Any], client: dict[str, Any], now: float) -> str:
    if inbound.get("enable") is False or client.get("enable") is False:
        return "disabled"
    expiry = client.get("expiryTime") or 0
    if isinstance(expiry, bool) or not isinstance(expiry, int | float):
        raise ValueError("expiryTime is not a number")
    # In milliseconds. Below 0: a duration that begins with the first connection.
    return "expired" if 0 < expiry <= now * 1000 else ""


if __name__ == "__main__":
    main()
