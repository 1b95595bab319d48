"""Random mutations of JSON: values dropped, doubled, retyped, nested, huge or odd."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

# Depths of nesting, beyond any real configuration, and how often a value is nested.
_DEPTHS = (1, 5, 50, 400, 3000)
_NESTED = 0.1
# How often a container is changed as a whole instead of a value inside it.
_STOPS = 0.2
_NUMBERS = (0, -1, 1, 0.5, 65536, 2**31, 2**63, 2**64, -(2**70), 10**400, 1e308, True)
_TEXTS = (
    *("", " ", "\0", "\ufeff", "\u202e", "e\u0301", "\ud800", "\U0001f600", "ﬁ", "K", "~txnode-", "@txnode", ">>>"),
    *("../" * 20, "/dev/zero", "/proc/self/environ", "env:PATH", "x" * 70_000, "%s%n", "[::1]:0", "-1", "\r\n"),
)
_VALUES: tuple[Any, ...] = (None, [], {}, [[]], {"": None}, *_NUMBERS, *_TEXTS)


def mutate(text: str, random: Random, times: int = 3) -> Any:
    """Parse JSON and change a few of its values."""
    changed = [json.loads(text)]
    for _ in range(random.randint(1, times)):
        random.choice(_CHANGES)(*_slot(changed, random), random)
    if random.random() < _NESTED:
        # Last, because such a deep value cannot be copied.
        _nest(*_slot(changed, random), random)
    return changed[0]


def _slot(root: list[Any], random: Random) -> tuple[Any, Any]:
    """A random value, as its container and its key or index."""
    holder: Any = root
    while True:
        key = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
        if not isinstance(holder[key], (dict, list)) or not holder[key] or random.random() < _STOPS:
            return holder, key
        holder = holder[key]


def _drop(holder: Any, key: Any, random: Random) -> None:
    if isinstance(holder, dict) or len(holder) > 1:
        del holder[key]


def _double(holder: Any, key: Any, random: Random) -> None:
    if isinstance(holder, list):
        holder.insert(key, deepcopy(holder[key]))
    else:
        holder[random.choice((key.upper(), key.title(), f"{key}s", f"{key} "))] = deepcopy(holder[key])


def _replace(holder: Any, key: Any, random: Random) -> None:
    holder[key] = deepcopy(random.choice(_VALUES))


def _nest(holder: Any, key: Any, random: Random) -> None:
    for _ in range(random.choice(_DEPTHS)):
        holder[key] = random.choice(([holder[key]], {"rules": holder[key]}))


def _wrap(holder: Any, key: Any, random: Random) -> None:
    """Replace a value by a list of it, a list by its first item, or a value by its text."""
    value = holder[key]
    holder[key] = random.choice(([value], value[0] if isinstance(value, list) and value else value, str(value)[:1000]))


def _move(holder: Any, key: Any, random: Random) -> None:
    """Swap two values."""
    other = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    holder[key], holder[other] = holder[other], holder[key]


def _multiply(holder: Any, key: Any, random: Random) -> None:
    if isinstance(holder[key], list) and holder[key] and len(str(holder[key])) < 10_000:
        holder[key] = holder[key] * random.choice((2, 30))


_CHANGES: tuple[Callable[[Any, Any, Random], None], ...] = (_drop, _double, _replace, _wrap, _move, _multiply)


def text_of(tree: Any, random: Random) -> str:
    """The tree as JSON, now and then truncated, with trailing text, a comment, or a changed character."""
    try:
        text = json.dumps(tree, ensure_ascii=random.random() < 0.5)
    except (RecursionError, ValueError):
        return "[" * 100_000
    return random.choice((*[_same] * 12, _cut, _more, _comment, _flip))(text, random)


def _same(text: str, random: Random) -> str:
    return text


def _cut(text: str, random: Random) -> str:
    return text[: random.randint(0, len(text))]


def _more(text: str, random: Random) -> str:
    return text + random.choice(("{}", "\0", "//", "/*", text, "]" * 1000))


def _comment(text: str, random: Random) -> str:
    return text.replace(", ", random.choice((", // x\n", ", /* x", ", #\n", ",,")), 1)


def _flip(text: str, random: Random) -> str:
    at = random.randrange(len(text) + 1)
    return text[:at] + chr(random.choice((0, 34, 92, 123, 0x7F, 0xD800, 0x10FFFF))) + text[at + 1 :]


def bytes_of(tree: Any, random: Random) -> bytes:
    """The tree as JSON in a random encoding, mostly UTF-8, now and then with changed bytes."""
    encoding = random.choice((*["utf-8"] * 12, "utf-16", "utf-32", "latin-1"))
    errors = "surrogatepass" if encoding.startswith("utf") else "replace"
    return flipped(text_of(tree, random).encode(encoding, errors), random)


def flipped(data: bytes, random: Random) -> bytes:
    """The bytes, now and then with some changed, removed or doubled."""
    out = bytearray(data)
    for _ in range(random.choice((0, 0, 0, 0, 0, 1, 3))):
        if out:
            at = random.randrange(len(out))
            piece = bytes(out[at : at + random.randint(0, 40)])
            out[at : at + random.randint(0, 3)] = random.choice((b"", piece, random.randbytes(2), b"\xff" * 10))
    return bytes(out)
