"""Parsers for ABUSE (`torrent: cut 10m; scan: tell`) and ABUSE_INBOUNDS (`free: torrent block, scan cut 1h`). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from node.contract.abuse import OFF, Action, ByKind, Kind, Rule
from node.limits.parsing import speed

_TIME = re.compile(r"([0-9]{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHORTEST, _LONGEST = 5, 30 * 86_400
_SLOWEST = 8_000
_SECONDS_BY_DEFAULT, _SPEED_BY_DEFAULT = 600, 10**6
# Tags may contain colons: the one before a kind ends the tag.
_NAMED = re.compile(rf"(.*?\S.*?):\s*((?:{'|'.join(Kind)})\b.*|off\s*)", re.DOTALL | re.IGNORECASE)
WORDS = "torrent: cut 10m; scan: tell; mail: block"
WORDS_OF_INBOUNDS = "free: torrent block, scan cut 1h; staff: off"


def by_kind(text: str) -> ByKind:
    """Parse ABUSE. Raises `ValueError` with what is wrong."""
    return _rules(text.split(";"), WORDS)


def by_inbound(text: str) -> Mapping[str, ByKind]:
    """Parse ABUSE_INBOUNDS. Raises `ValueError` with what is wrong."""
    found: dict[str, ByKind] = {}
    for part in filter(str.strip, text.split(";")):
        named = _NAMED.fullmatch(part)
        if named is None:
            raise ValueError(f"{part.strip()!r} has no tag of an inbound: write {WORDS_OF_INBOUNDS}")
        tag, rules = named[1].strip(), named[2]
        off = rules.strip().lower() == Action.OFF
        found[tag] = dict.fromkeys(Kind, OFF) if off else _rules(rules.split(","), WORDS_OF_INBOUNDS)
    return found


def _rules(parts: list[str], example: str) -> ByKind:
    found: dict[Kind, Rule] = {}
    for part in filter(str.strip, parts):
        name, *words = part.replace(":", " ", 1).split()
        if name.lower() not in [*Kind] or not words or words[0].lower() not in [*Action]:
            kinds, actions = ", ".join(Kind), ", ".join(Action)
            raise ValueError(f"{part.strip()!r} is not a kind ({kinds}) and an action ({actions}): write {example}")
        kind = Kind(name.lower())
        if kind in found:
            raise ValueError(f"{kind} has two actions")
        found[kind] = _rule(kind, Action(words[0].lower()), words[1:])
    return found


def _rule(kind: Kind, action: Action, words: list[str]) -> Rule:
    if kind is Kind.SCAN and action is Action.BLOCK:
        raise ValueError("scan: block: no core can tell the requests of a scan from others: write tell, slow or cut")
    bits = speed(words.pop(0)) if words and action is Action.SLOW else _SPEED_BY_DEFAULT
    if bits < _SLOWEST:
        raise ValueError(f"{kind}: {action}: less than {_SLOWEST} bits a second is no speed")
    seconds = _seconds(words.pop(0)) if words and action in (Action.SLOW, Action.CUT) else _SECONDS_BY_DEFAULT
    if words:
        raise ValueError(f"{kind}: {action}: what does {' '.join(words)!r} mean? Write cut 10m, or slow 1M 10m")
    match action:
        case Action.CUT:
            return Rule(action, seconds)
        case Action.SLOW:
            return Rule(action, seconds, bits)
        case _:
            return Rule(action)


def _seconds(text: str) -> int:
    found = _TIME.fullmatch(text.lower())
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not _SHORTEST <= seconds <= _LONGEST:
        raise ValueError(f"{text!r} is not a time from {_SHORTEST}s to 30d, such as 10m or 2h")
    return seconds
