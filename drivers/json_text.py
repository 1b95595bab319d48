"""Reading a controller's JSON that has comments (`//`, `#`, `/* */`), which the cores take. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

# A string is matched first, so that what looks like a comment inside one stays.
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)


def parse(text: str) -> Any:
    """The text as a value, comments left out. Raises `ValueError`."""
    try:
        return json.loads(_bare(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def fingerprint(text: str) -> str:
    """Equal for texts that differ in the order of keys, white space and comments only. An unreadable one is itself.

    Keys that stand twice are kept: cores merge what they hold.
    """
    try:
        meaning = json.dumps(json.loads(_bare(text), object_pairs_hook=_ordered))
    except (ValueError, RecursionError):
        meaning = json.dumps(text)
    return hashlib.sha256(meaning.encode("utf-8", "surrogatepass")).hexdigest()


def _bare(text: str) -> str:
    return _STRING_OR_COMMENT.sub(lambda match: match.group(1) or " ", text)


def _ordered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {"members": sorted(pairs, key=lambda pair: pair[0])}
