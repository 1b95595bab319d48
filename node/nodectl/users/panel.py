"""Users as Marzban and PasarGuard list them over their interfaces: `username`, `proxies`, `inbounds`, `status`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from node.nodectl.users.supply import Entry, message_of
from protos import service_pb2 as pb

# Statuses of users who may connect. On hold: their time begins with the first connection.
_IN = ("active", "on_hold")
_KINDS = {field.name: field.message_type for field in pb.Proxy.DESCRIPTOR.fields}


def entry(document: dict[str, Any], now: float) -> Entry:
    """The user, named by `username`. Raises `ValueError`."""
    user = pb.User(email=_text(document, "username"), inbounds=_inbounds(document.get("inbounds")))
    settings = document.get("proxies") or document.get("proxy_settings") or {}
    if not isinstance(settings, dict):
        raise ValueError("proxies is not an object")
    user.proxies.CopyFrom(_proxies(settings))
    return Entry(user, _off(document, now))


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
