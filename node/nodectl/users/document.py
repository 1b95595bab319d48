"""Users in JSON: messages of this interface, or exports of panels, recognized by their shape."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

from node.nodectl.users import panel, xui
from node.nodectl.users.supply import Entry, Supply, message_of
from protos import service_pb2 as pb

_UNKNOWN = (
    "no users found in a known shape: users of this interface, a list of users of Marzban or PasarGuard, or inbounds "
    "of 3x-ui"
)


def read(text: str, supply: Supply, now: float) -> None:
    """Read the users of a document; `now` in Unix seconds. Raises `ValueError`."""
    try:
        document = _inner(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    if inbounds := xui.inbounds_of(document):
        for name, make in xui.entries(inbounds, now):
            supply.take(partial(_place, text, 0, name), make)
        return
    users = document.get("users", document.get("items")) if isinstance(document, dict) else document
    if not isinstance(users, list):
        raise ValueError(_UNKNOWN)
    for number, user in enumerate(users, 1):
        if not isinstance(user, dict):
            raise ValueError(f"user {number} is not an object")
        read_user = partial(panel.entry, user, now) if "username" in user else partial(_ours, user)
        supply.take(partial(_place, text, number, _name(user)), read_user)


def _inner(document: Any) -> Any:
    """Unwrap the output of nodectl (`result`) and replies of panels (`obj`)."""
    if isinstance(document, list) and len(document) == 1 and isinstance(document[0], dict) and "result" in document[0]:
        return document[0]["result"]
    if isinstance(document, dict) and "obj" in document:
        return document["obj"]
    return document


def _ours(entry: dict[str, Any]) -> Entry:
    """A `User` of this interface, or a row of `nodectl users list --json --credentials`."""
    if entry.get("shortened"):
        raise ValueError("the row was shortened: its user is not complete")
    name, inbounds = entry.get("email", entry.get("name")), entry.get("inbounds") or []
    unknown = entry.get("unknown") or []
    if not (isinstance(inbounds, list) and isinstance(unknown, list)):
        raise ValueError("inbounds is not an array")
    wanted = {"email": name or "", "inbounds": [*inbounds, *unknown]}
    if (limits := entry.get("limits")) is not None:
        if not isinstance(limits, dict):
            raise ValueError("limits is not an object")
        # null means not given; 0 means no limit.
        wanted["limits"] = {name: value for name, value in limits.items() if value is not None}
    proxies = entry.get("proxies") or {}
    if isinstance(proxies, dict):
        proxies = {name: value for name, value in proxies.items() if value}
    return Entry(message_of({**wanted, "proxies": proxies}, pb.User()))


def _name(user: dict[str, Any]) -> str:
    names: Iterable[Any] = (user.get(field) for field in ("email", "name", "username"))
    return next((name for name in names if isinstance(name, str)), "")


def _place(text: str, number: int, name: str) -> str:
    """Where a user is in the text: the line on which their name first occurs, if any, and their number."""
    at = text.find(json.dumps(name, ensure_ascii=False)) if name else -1
    line = f"line {text.count(chr(10), 0, at) + 1}" if at >= 0 else ""
    return ", ".join(filter(None, (line, f"user {number}" if number else name)))
