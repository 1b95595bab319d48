"""Reading a controller's JSON that has comments (`//`, `#`, `/* */`), which the cores take. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

# A string is matched first, so that what looks like a comment inside one stays. One without an end goes on to the
# text's: tried again from each of its quotes it would take hours.
_STRING_OR_COMMENT = re.compile(r'("[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z))|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
Pairs = list[tuple[str, Any]]


def parse(text: str) -> Any:
    """The text as a value, comments left out. Raises `ValueError`."""
    try:
        return _read(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def fingerprint(text: str) -> str:
    """Equal for texts that differ in the order of keys, white space and comments only. An unreadable one is itself.

    So is one that has a key twice, in whatever case: cores merge what such keys hold, in their order.
    """
    try:
        meaning = json.dumps(_read(text, _distinct), sort_keys=True)
    except (ValueError, RecursionError):
        meaning = text
    return hashlib.sha256(meaning.encode("utf-8", "surrogatepass")).hexdigest()


def _read(text: str, make: Callable[[Pairs], dict[str, Any]] | None = None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=make)
    except json.JSONDecodeError:
        return json.loads(bare(text), object_pairs_hook=make)


def bare(text: str) -> str:
    """Without its comments."""
    return _STRING_OR_COMMENT.sub(lambda match: match.group(1) or " ", text)


def _distinct(pairs: Pairs) -> dict[str, Any]:
    if len({key.lower() for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)
