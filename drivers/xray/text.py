"""Reading, never editing, the controller's JSON: the few things that Xray's own conversion leaves out. Pure.

Xray takes keys in any case and comments (`//`, `#`, `/* */`), so both are taken here. What cannot be read is left
alone: the core has the last word on whether a text is valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from ipaddress import ip_network
from typing import Any, NamedTuple

from drivers.json_text import bare, parse

# Of numbers, which may have any length, nothing is read here.
_LENIENT = json.JSONDecoder(parse_int=str, parse_float=str)


class Hints(NamedTuple):
    """What an inbound's settings say for users who say nothing themselves, and whether its own are `users` alone."""

    flow: str = ""
    method: str = ""
    renamed: bool = False


def top(text: str) -> frozenset[str] | None:
    """The keys of the configuration, in lower case, as the core reads them: it stops after the first value.

    None where the node cannot read it.
    """
    try:
        value = _first(text)
    except (ValueError, RecursionError):
        return None
    return frozenset(map(str.lower, value)) if isinstance(value, dict) else None


def _first(text: str) -> Any:
    try:
        return _LENIENT.raw_decode(text.lstrip())[0]
    except json.JSONDecodeError:
        return _LENIENT.raw_decode(bare(text).lstrip())[0]


def hints(text: str, inbounds: int) -> list[Hints]:
    """For each of the `inbounds` inbounds, in order, its hints; empty ones where the text cannot be read."""
    try:
        found = list(_hints(parse(text)))
    except (ValueError, RecursionError):
        found = []
    return found if len(found) == inbounds else [Hints()] * inbounds


def private_targets(text: str) -> frozenset[str]:
    """The outbounds to which routing rules lead private addresses by name."""
    try:
        rules = _get(_get(parse(text), "routing"), "rules")
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(
        str(_get(rule, "outboundtag"))
        for rule in (rules if isinstance(rules, list) else [])
        if any(map(_is_private, _strings(_get(rule, "ip"))))
    )


def _is_private(text: str) -> bool:
    if text.lower() == "geoip:private":
        return True
    try:
        return ip_network(text, strict=False).is_private
    except ValueError:
        return False


def _strings(value: Any) -> list[str]:
    """A list as the core reads it: one text may have several, between commas."""
    texts = value if isinstance(value, list) else [value]
    return [part.strip() for text in texts if isinstance(text, str) for part in text.split(",")]


def _hints(config: Any) -> Iterator[Hints]:
    inbounds = _get(config, "inbounds")
    for inbound in inbounds if isinstance(inbounds, list) else []:
        settings = _get(inbound, "settings")
        flow, method = _get(settings, "flow"), _get(settings, "method")
        renamed = bool(_get(settings, "users")) and not _get(settings, "clients")
        yield Hints(flow if isinstance(flow, str) else "", method if isinstance(method, str) else "", renamed)


def _get(value: Any, name: str) -> Any:
    """A member by its name in any case, as Go's decoder finds it."""
    if not isinstance(value, dict):
        return None
    return next((member for key, member in value.items() if key.lower() == name), None)
