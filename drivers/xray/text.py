"""Reading, never editing, the controller's JSON: the few things that Xray's own conversion leaves out. Pure.

Xray takes keys in any case and comments (`//`, `#`, `/* */`), so both are taken here. What cannot be read is left
alone: the core has the last word on whether a text is valid.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

# A string is matched first, so that what looks like a comment inside one stays.
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)


class Hints(NamedTuple):
    """What an inbound's settings say for users who say nothing themselves."""

    flow: str = ""
    method: str = ""


def parse(text: str) -> Any:
    """The text as a value, comments left out. Raises `ValueError`."""
    return json.loads(_bare(text))


def _bare(text: str) -> str:
    return _STRING_OR_COMMENT.sub(lambda match: match.group(1) or " ", text)


def fingerprint(text: str) -> str:
    """Equal for texts that differ in the order of keys, white space and comments only. An unreadable one is itself.

    Keys that stand twice are kept: the core merges what they hold.
    """
    try:
        value = json.loads(_bare(text), object_pairs_hook=_ordered)
    except (ValueError, RecursionError):
        value = text
    return hashlib.sha256(json.dumps(value).encode("utf-8", "surrogatepass")).hexdigest()


def _ordered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {"members": sorted(pairs, key=lambda pair: pair[0])}


def hints(text: str, inbounds: int) -> list[Hints]:
    """For each of the `inbounds` inbounds, in order, its hints; empty ones where the text cannot be read."""
    try:
        found = list(_hints(parse(text)))
    except (ValueError, RecursionError):
        found = []
    return found if len(found) == inbounds else [Hints()] * inbounds


def _hints(config: Any) -> Iterator[Hints]:
    for inbound in _get(config, "inbounds") or []:
        settings = _get(inbound, "settings")
        flow, method = _get(settings, "flow"), _get(settings, "method")
        yield Hints(flow if isinstance(flow, str) else "", method if isinstance(method, str) else "")


def _get(value: Any, name: str) -> Any:
    """A member by its name in any case, as Go's decoder finds it."""
    if not isinstance(value, dict):
        return None
    return next((member for key, member in value.items() if key.lower() == name), None)
