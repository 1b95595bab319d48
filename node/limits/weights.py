"""WEIGHTS: factors by which users' bytes count towards their quotas, by inbound and hour of the day. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from fractions import Fraction
from functools import cached_property

from node.contract.counters import SEPARATOR
from node.traffic.sums import Sums

# Parts of a byte in which weighted bytes are kept: so a factor has up to three decimals, and sums are exact.
PARTS = 1000
# The greatest factor.
MOST = 100
# Minutes.
_DAY = 24 * 60
# The last colon before a space ends the tags and hours, as in LIMITS_INBOUNDS.
_RULE = re.compile(r"(.*\S):\s+(\S+)", re.DOTALL)
_HOURS = re.compile(r"(?:(.*\S)\s+)?([0-9:]*:[0-9:]*\s*-\s*[0-9:]+)", re.DOTALL)
_SPAN = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-4]):([0-5][0-9])")
_FACTOR = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3})?")


@dataclass(frozen=True)
class Rule:
    """A factor, in PARTS, in inbounds with these tags, or in all, for `length` minutes from minute `begin` of the day.

    The minutes are those that the clock shows; they may pass midnight.
    """

    factor: int
    tags: frozenset[str] = frozenset()
    begin: int = 0
    length: int = _DAY

    def fits(self, tag: str | None, minute: int) -> bool:
        """Whether it holds for an inbound at this minute of the day; None is an inbound that is not known."""
        return (minute - self.begin) % _DAY < self.length and (not self.tags or tag in self.tags)


def rules(text: str) -> tuple[Rule, ...]:
    """Parse WEIGHTS (`premium, gold: 2; 00:00-06:00: 0.5`). Raises `ValueError` with what is wrong."""
    return tuple(_rule(part.strip()) for part in text.split(";") if part.strip())


def _rule(text: str) -> Rule:
    found = _RULE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a rule: write TAG: 2, 00:00-06:00: 0.5 or TAG 00:00-06:00: 0.5")
    names, span = found[1], "00:00-24:00"
    if (hours := _HOURS.fullmatch(names)) is not None:
        names, span = hours[1] or "", hours[2]
    tags = frozenset(filter(None, map(str.strip, names.split(","))))
    if names and not tags:
        raise ValueError(f"{text!r} has no tag of an inbound before its hours")
    return Rule(_factor(found[2]), tags, *_minutes(span))


def _factor(text: str) -> int:
    if not _FACTOR.fullmatch(text) or Fraction(text) > MOST:
        raise ValueError(f"{text!r} is not a factor: write a number from 0 to {MOST}, with up to three decimals")
    return int(Fraction(text) * PARTS)


def _minutes(text: str) -> tuple[int, int]:
    """The first minute of some hours, and their number."""
    span = _SPAN.fullmatch(text)
    begin, end = (60 * int(span[at]) + int(span[at + 1]) for at in (1, 3)) if span else (0, 0)
    if begin == end or end > _DAY:
        raise ValueError(f"{text!r} are not hours of the day: write 00:00-06:00, or 22:00-06:00 over midnight")
    return begin, (end - begin - 1) % _DAY + 1


def fault_of(rules: Iterable[Rule], by_inbound: bool) -> str:
    """Why these rules cannot be used, or "". `by_inbound`: whether users' bytes are counted by inbound."""
    if by_inbound or not (tags := _tags(rules)):
        return ""
    return f"rules for inbounds ({', '.join(sorted(tags))}) need USER_INBOUNDS=on; rules with hours alone do not"


def _tags(rules: Iterable[Rule]) -> set[str]:
    return {tag for rule in rules for tag in rule.tags}


@dataclass(frozen=True)
class Weights:
    """Of several rules that fit the last one holds; without one the factor is 1. `zone`: where the hours are shown."""

    rules: tuple[Rule, ...] = ()
    zone: tzinfo = UTC

    @cached_property
    def most(self) -> float:
        """The greatest factor at any time."""
        return max([PARTS, *(rule.factor for rule in self.rules)]) / PARTS

    def unknown(self, tags: AbstractSet[str]) -> list[str]:
        """Warnings about rules for other inbounds than these."""
        others = sorted(_tags(self.rules) - tags)
        return [f"WEIGHTS: the backend has no inbound {tag!r} for users: rules for it have no effect" for tag in others]

    def factor(self, tag: str | None, now: float) -> int:
        """The factor, in PARTS, for an inbound at a time in Unix seconds; None is an inbound that is not known."""
        shown = datetime.fromtimestamp(now, self.zone)
        minute = 60 * shown.hour + shown.minute
        return next((rule.factor for rule in reversed(self.rules) if rule.fits(tag, minute)), PARTS)

    def beyond(self, moved: Sums, by_inbound: Sums, now: float) -> Sums:
        """What users' bytes weigh above their number, by key, in PARTS, each way; negative if they weigh less.

        `by_inbound` may have any part of the same bytes, before or after them: those of a user of whom it has none
        weigh as in an inbound that is not known, and only the difference is added here.
        """
        known = self.factor(None, now)
        found = Sums()
        if known != PARTS:
            found.up, found.down = (
                {key: count * (known - PARTS) for key, count in column.items()} for column in (moved.up, moved.down)
            )
        factors: dict[str, int] = {}
        for name, up, down in by_inbound.rows():
            key, _, tag = name.partition(SEPARATOR)
            if tag not in factors:
                factors[tag] = self.factor(tag, now) - known
            found.count(key, up * factors[tag], down * factors[tag])
        return found
