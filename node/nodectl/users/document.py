"""Users in JSON: as this interface has them, or as panels export them; which of these it is shows by its shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from node.nodectl.users import panel, xui
from node.nodectl.users.supply import Entry, Supply
from protos import service_pb2 as pb

_Make = Callable[[dict[str, Any], float], Entry]
_UNKNOWN = (
    "it has no users in a shape that is known: those of this interface, a list of users of Marzban or PasarGuard, or "
    "inbounds of 3x-ui"
)


def read(text: str, supply: Supply, now: float) -> None:
    """Take the users of a document; `now` is the time, in Unix seconds. Raises `ValueError`."""
    try:
        said = _inner(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if inbounds := xui.inbounds_of(said):
        for entry in xui.entries(inbounds, now):
            supply.take(partial(_place, text, 0, entry.name), entry.make)
        return
    for number, user, make in _users(said):
        supply.take(partial(_place, text, number, _name(user)), partial(make, user, now))


def _inner(said: Any) -> Any:
    """What nodectl's own answers, and replies of panels, have inside."""
    if isinstance(said, list) and len(said) == 1 and isinstance(said[0], dict) and "result" in said[0]:
        return said[0]["result"]
    if isinstance(said, dict) and "obj" in said:
        return said["obj"]
    return said


def _users(said: Any) -> Iterator[tuple[int, dict[str, Any], _Make]]:
    users = said.get("users", said.get("items")) if isinstance(said, dict) else said
    if not isinstance(users, list):
        raise ValueError(_UNKNOWN)
    for number, user in enumerate(users, 1):
        if not isinstance(user, dict):
            raise ValueError(f"user {number} is no object")
        yield number, user, panel.entry if "username" in user else ours


def ours(said: dict[str, Any], _: float) -> Entry:
    """A user as the interface has them; a row of `nodectl users list --json --credentials` will do."""
    if said.get("shortened"):
        raise ValueError("the row was shortened: it does not have all of the user")
    name, inbounds = said.get("email", said.get("name")), said.get("inbounds") or []
    unknown = said.get("unknown") or []
    if not (isinstance(inbounds, list) and isinstance(unknown, list)):
        raise ValueError("inbounds is no array")
    wanted = {"email": name or "", "inbounds": [*inbounds, *unknown]}
    if (limits := said.get("limits")) is not None:
        if not isinstance(limits, dict):
            raise ValueError("limits is no object")
        # What is null is not said; 0 is a word.
        wanted["limits"] = {name: value for name, value in limits.items() if value is not None}
    try:
        return Entry(ParseDict({**wanted, "proxies": _filled(said.get("proxies") or {})}, pb.User()))
    except (ParseError, TypeError) as error:
        raise ValueError(str(error)) from error


def _filled(proxies: Any) -> Any:
    """Without what says nothing."""
    return {name: value for name, value in proxies.items() if value} if isinstance(proxies, dict) else proxies


def _name(user: dict[str, Any]) -> str:
    names: Iterable[Any] = (user.get(field) for field in ("email", "name", "username"))
    return next((name for name in names if isinstance(name, str)), "")


def _place(text: str, number: int, name: str) -> str:
    """Where somebody stands: the line on which their name is said first, if it is, and which one they are."""
    at = text.find(json.dumps(name, ensure_ascii=False)) if name else -1
    line = f"line {text.count(chr(10), 0, at) + 1}" if at >= 0 else ""
    return ", ".join(filter(None, (line, f"user {number}" if number else name)))
