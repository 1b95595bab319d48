"""Limits as people write them, in settings and on command lines: `addresses=3 down=100M bytes=500GB/month@5`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from fractions import Fraction

from node.contract.limits import fault_of
from node.limits.defaults import Defaults
from node.limits.words import size
from protos import service_pb2
from protos.service_pb2 import Limits, Quota

_SPEED = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,9}))?\s*([kmgt])?", re.IGNORECASE)
_STEPS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_QUOTA = re.compile(r"([^/@]+)(?:/(day|week|month)(?:@([0-9]{1,2}))?)?", re.IGNORECASE)
# A tag may have colons, too, and a time of day has some: the last one counts that a space follows.
_NAMED = re.compile(r"(.*\S.*):\s+(.*)", re.DOTALL)
_WAYS = {"both": Quota.BOTH, "up": Quota.UP, "down": Quota.DOWN}
_PERIODS = {"day": Quota.DAY, "week": Quota.WEEK, "month": Quota.MONTH}
WORDS = "addresses=3, down=10M, up=2M, bytes=100GB/month@5, way=down, expires=2026-12-31, tell=bytes+addresses"


def limits(text: str) -> Limits:
    """What these words say, with spaces or commas between them. Raises `ValueError`, which says what is wrong."""
    said = Limits()
    for word in text.replace(",", " ").split():
        name, given, value = word.partition("=")
        if not given or name.lower() not in _READ:
            raise ValueError(f"{word!r} is no limit: write some of {WORDS}")
        _READ[name.lower()](said, value)
    if fault := fault_of(said):
        raise ValueError(fault)
    return said


def defaults(everybody: str, inbounds: str) -> Defaults:
    """Of everybody, and of inbounds: `free: down=2M bytes=10GB/month; trial: addresses=1`. Raises `ValueError`."""
    found = {}
    for part in filter(str.strip, inbounds.split(";")):
        named = _NAMED.fullmatch(part)
        if named is None:
            raise ValueError(f"{part.strip()!r} names no inbound: write TAG: {WORDS}")
        found[named[1].strip()] = limits(named[2])
    return Defaults(limits(everybody), found)


def fault(read: Callable[[str], object], text: str) -> str:
    """Why this cannot be read, or nothing."""
    try:
        read(text)
    except ValueError as error:
        return str(error)
    return ""


def speed(text: str) -> int:
    """Bits a second: `10M`, `1.5G` or a number. Raises `ValueError`."""
    found = _SPEED.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no speed: write 10M, 1.5G or a number of bits a second")
    whole, part, unit = found.groups()
    return int(Fraction(f"{whole}.{part or 0}") * _STEPS[(unit or "").lower()])


def moment(text: str) -> int:
    """Unix seconds: a number of them, or a day, which begins at midnight UTC. Raises `ValueError`."""
    if text.isascii() and text.isdigit() and len(text) < 15:
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no time: write 2026-12-31, 2026-12-31T12:00 or Unix seconds") from None
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())


def _bytes(said: Limits, value: str) -> None:
    found = _QUOTA.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is no quota: write 100GB, 5GiB/day, 100GB/month@5")
    much, period, day = found.groups()
    said.bytes.bytes = size(much)
    said.bytes.period = _PERIODS[period.lower()] if period else Quota.NEVER
    said.bytes.reset_day = int(day or 0)


def _way(said: Limits, value: str) -> None:
    if value.lower() not in _WAYS:
        raise ValueError(f"{value!r} is none of {', '.join(_WAYS)}")
    said.bytes.way = _WAYS[value.lower()]


def _addresses(said: Limits, value: str) -> None:
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ValueError(f"{value!r} is no number of addresses")
    said.addresses = int(value)


def _expires(said: Limits, value: str) -> None:
    said.expires_at = moment(value)


def _down(said: Limits, value: str) -> None:
    said.speed.down = speed(value)


def _up(said: Limits, value: str) -> None:
    said.speed.up = speed(value)


def _tell(said: Limits, value: str) -> None:
    for name in value.lower().split("+"):
        if name == "bytes":
            said.bytes.action = service_pb2.TELL
        elif name in ("addresses", "expires"):
            setattr(said, f"{name}_action", service_pb2.TELL)
        else:
            raise ValueError(f"tell={value}: {name!r} is none of bytes, addresses, expires")


_READ: Mapping[str, Callable[[Limits, str], None]] = {
    "bytes": _bytes,
    "way": _way,
    "addresses": _addresses,
    "expires": _expires,
    "down": _down,
    "up": _up,
    "tell": _tell,
}
