"""Users as the interfaces of Marzban and PasarGuard list them: `username`, `proxies`, `inbounds`, `status`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from node.nodectl.users.supply import Entry
from protos import service_pb2 as pb

# What lets a user in. On hold: their time begins with the first connection.
_IN = ("active", "on_hold")
_KINDS = {field.name: field.message_type for field in pb.Proxy.DESCRIPTOR.fields}


def entry(said: dict[str, Any], now: float) -> Entry:
    """The user, by the name that they have there. Raises `ValueError`."""
    user = pb.User(email=_text(said, "username"), inbounds=_inbounds(said.get("inbounds")))
    settings = said.get("proxies") or said.get("proxy_settings") or {}
    if not isinstance(settings, dict):
        raise ValueError("proxies is no object")
    user.proxies.CopyFrom(_proxies(settings))
    return Entry(user, _off(said, now))


def _proxies(settings: dict[str, Any]) -> pb.Proxy:
    """What of them a node has a use for: a trojan's flow and the like are not."""
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
    try:
        return ParseDict(known, pb.Proxy())
    except ParseError as error:
        raise ValueError(str(error)) from error


def _inbounds(said: Any) -> list[str]:
    """Tags by protocol, or tags alone."""
    if said is None:
        return []
    lists = list(said.values()) if isinstance(said, dict) else [said]
    if not all(isinstance(tags, list) and all(isinstance(tag, str) for tag in tags) for tags in lists):
        raise ValueError("inbounds has something else than tags")
    return sorted({tag for tags in lists for tag in tags})


def _off(said: dict[str, Any], now: float) -> str:
    status = _text(said, "status", "active").lower()
    if status not in _IN:
        return status
    return "expired" if 0 < _expiry(said.get("expire")) <= now else ""


def _expiry(said: Any) -> float:
    """In Unix seconds; 0 is never."""
    try:
        if isinstance(said, str) and said:
            when = datetime.fromisoformat(said)
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        if not isinstance(said, bool | list | dict):
            return float(said or 0)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"expire is {str(said)[:40]!r}, which is no time") from error
    raise ValueError("expire is no time")


def _text(said: dict[str, Any], field: str, default: str = "") -> str:
    value = said.get(field, default)
    if not isinstance(value, str):
        raise ValueError(f"{field} is no text")
    return value
