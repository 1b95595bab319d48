"""Parsers for limits, such as `addresses=3 down=100M bytes=500GB/month@5`, and for sizes, speeds and times. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from fractions import Fraction

from node.contract.limits import fault_of
from protos import service_pb2
from protos.service_pb2 import Limits, Quota

_SIZE = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,9}))?\s*(?:([kmgtp])(i)?)?b?", re.IGNORECASE)
# The largest size that a message and the state file can hold.
MOST = 2**63 - 1
_SPEED = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,9}))?\s*([kmgt])?", re.IGNORECASE)
_UNITS = {letter: number for number, letter in enumerate("kmgtp", 1)}
_QUOTA = re.compile(r"([^/@]+)(?:/(day|week|month)(?:@([0-9]{1,2}))?)?", re.IGNORECASE)
# Tags and times of day may contain colons: the last colon before a space ends the tag.
_NAMED = re.compile(r"(.*\S.*):\s+(.*)", re.DOTALL)
_PERIODS = {"day": Quota.DAY, "week": Quota.WEEK, "month": Quota.MONTH}
_WAYS = {"both": Quota.BOTH, "up": Quota.UP, "down": Quota.DOWN}
WORDS = "addresses=3, down=10M, up=2M, bytes=100GB/month@5, way=down, expires=2026-12-31, tell=bytes+addresses"


def limits(text: str) -> Limits:
    """Parse limits separated by spaces or commas. Raises `ValueError` with what is wrong."""
    found = Limits()
    for word in text.replace(",", " ").split():
        name, given, value = word.partition("=")
        if not given or not _read(found, name.lower(), value):
            raise ValueError(f"{word!r} is not a limit: write some of {WORDS}")
    if fault := fault_of(found):
        raise ValueError(fault)
    return found


def by_inbound(text: str) -> Mapping[str, Limits]:
    """Parse LIMITS_INBOUNDS (`free: down=2M bytes=10GB/month; trial: addresses=1`). Raises `ValueError`."""
    found = {}
    for part in filter(str.strip, text.split(";")):
        named = _NAMED.fullmatch(part)
        if named is None:
            raise ValueError(f"{part.strip()!r} has no tag of an inbound: write TAG: {WORDS}")
        found[named[1].strip()] = limits(named[2])
    return found


def size(text: str) -> int:
    """Parse bytes: `2TB` and `2T` are decimal, `500GiB` and `500Gi` binary, a number alone is bytes.

    Raises `ValueError` for anything else, and for a fraction of a byte.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size: write 2TB, 500GiB or a number of bytes")
    whole, part, unit, binary = found.groups()
    factor = (1024 if binary else 1000) ** (_UNITS[unit.lower()] if unit else 0)
    count = Fraction(f"{whole}.{part or 0}") * factor
    if count.denominator != 1 or count > MOST:
        raise ValueError(f"{text!r} is not a whole number of bytes below 8 EiB")
    return int(count)


def speed(text: str) -> int:
    """Parse bits a second: `10M`, `1.5G` or a number. Raises `ValueError`."""
    found = _SPEED.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a speed: write 10M, 1.5G or a number of bits a second")
    whole, part, unit = found.groups()
    return int(Fraction(f"{whole}.{part or 0}") * 1000 ** (_UNITS[unit.lower()] if unit else 0))


def moment(text: str) -> int:
    """Parse a time: Unix seconds, or an ISO date or time, in UTC unless it has an offset. Raises `ValueError`."""
    if text.isascii() and text.isdigit() and len(text) < 15:
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time: write 2026-12-31, 2026-12-31T12:00 or Unix seconds") from None
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())


def _read(into: Limits, name: str, value: str) -> bool:
    """Set a limit by its name. Returns whether there is such a limit; raises `ValueError` for a wrong value."""
    match name:
        case "bytes":
            _bytes(into.bytes, value)
        case "way":
            if value.lower() not in _WAYS:
                raise ValueError(f"way={value}: {value!r} is not one of {', '.join(_WAYS)}")
            into.bytes.way = _WAYS[value.lower()]
        case "addresses":
            if not (value.isascii() and value.isdigit() and len(value) < 10):
                raise ValueError(f"{value!r} is not a number of addresses")
            into.addresses = int(value)
        case "expires":
            into.expires_at = moment(value)
        case "down":
            into.speed.down = speed(value)
        case "up":
            into.speed.up = speed(value)
        case "tell":
            _tell(into, value)
        case _:
            return False
    return True


def _bytes(into: Quota, value: str) -> None:
    found = _QUOTA.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is not a quota: write 100GB, 5GiB/day, 100GB/month@5")
    much, period, day = found.groups()
    into.bytes = size(much)
    into.period = _PERIODS[period.lower()] if period else Quota.NEVER
    into.reset_day = int(day or 0)


def _tell(into: Limits, value: str) -> None:
    for name in value.lower().split("+"):
        if name == "bytes":
            into.bytes.action = service_pb2.TELL
        elif name in ("addresses", "expires", "abuse"):
            setattr(into, f"{name}_action", service_pb2.TELL)
        else:
            raise ValueError(f"tell={value}: {name!r} is not one of bytes, addresses, expires, abuse")
