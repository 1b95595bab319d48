"""Parse, fingerprint and search JSON with comments (`//`, `#`, `/* */`), which the cores accept. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Strings come first, so that comments inside one stay. An unterminated string extends to the end of the text: matching
# again from each of its quotes would take hours.
_STRING_OR_COMMENT = re.compile(r'("[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z))|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
# An object.
Json = dict[str, Any]
Pairs = list[tuple[str, Any]]


def parse(text: str) -> Any:
    """Parse JSON with comments. Raises `ValueError`."""
    try:
        return _read(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def fingerprint(text: str) -> str:
    """A hash that ignores the order of keys, white space and comments.

    A text that cannot be parsed is hashed as it is; also one with a key twice (in any case), as cores merge such keys
    in order.
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
    """The text without its comments."""
    return _STRING_OR_COMMENT.sub(lambda match: match.group(1) or " ", text)


def _distinct(pairs: Pairs) -> dict[str, Any]:
    if len({key.lower() for key, _ in pairs}) < len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)


class Named(NamedTuple):
    """A string of a configuration: its path of keys, its key, and the string."""

    place: str
    key: str
    text: str


def texts(tree: Any) -> Iterator[Named]:
    """Yield every string of a configuration; one in a list has the key of the list."""
    rest: list[tuple[str, str, Any]] = [("", "", tree)]
    while rest:
        place, key, value = rest.pop()
        if isinstance(value, str):
            yield Named(place.removeprefix("."), key, value)
        elif isinstance(value, dict):
            rest += [(f"{place}.{name}", name, some) for name, some in value.items()]
        elif isinstance(value, list):
            rest += [(f"{place}[{number}]", key, some) for number, some in enumerate(value)]


def is_abstract(tree: Any) -> bool:
    """Whether a string may name an abstract socket."""
    return any(named.text.startswith("@") for named in texts(tree))
