"""Parser for limits in settings and on command lines, such as `addresses=3 down=100M bytes=500GB/month@5`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from fractions import Fraction

from node.contract.limits import fault_of
from node.limits.sizes import size
from protos import service_pb2
from protos.service_pb2 import Limits, Quota

_SPEED = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,9}))?\s*([kmgt])?", re.IGNORECASE)
_STEPS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_QUOTA = re.compile(r"([^/@]+)(?:/(day|week|month)(?:@([0-9]{1,2}))?)?", re.IGNORECASE)
# Tags and times of day may contain colons: the last colon before a space ends the tag.
_NAMED = re.compile(r"(.*\S.*):\s+(.*)", re.DOTALL)
_WAYS = {"both": Quota.BOTH, "up": Quota.UP, "down": Quota.DOWN}
_PERIODS = {"day": Quota.DAY, "week": Quota.WEEK, "month": Quota.MONTH}
WORDS = "addresses=3, down=10M, up=2M, bytes=100GB/month@5, way=down, expires=2026-12-31, tell=bytes+addresses"


def limits(text: str) -> Limits:
    """Parse limits separated by spaces or commas. Raises `ValueError` with what is wrong."""
    found = Limits()
    for word in text.replace(",", " ").split():
        name, given, value = word.partition("=")
        if not given or name.lower() not in _READ:
            raise ValueError(f"{word!r} is not a limit: write some of {WORDS}")
        _READ[name.lower()](found, value)
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


def speed(text: str) -> int:
    """Parse bits a second: `10M`, `1.5G` or a number. Raises `ValueError`."""
    found = _SPEED.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a speed: write 10M, 1.5G or a number of bits a second")
    whole, part, unit = found.groups()
    return int(Fraction(f"{whole}.{part or 0}") * _STEPS[(unit or "").lower()])


def moment(text: str) -> int:
    """Parse a time: Unix seconds, or an ISO date or time, in UTC unless it has an offset. Raises `ValueError`."""
    if text.isascii() and text.isdigit() and len(text) < 15:
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time: write 2026-12-31, 2026-12-31T12:00 or Unix seconds") from None
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())


def _bytes(into: Limits, value: str) -> None:
    found = _QUOTA.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is not a quota: write 100GB, 5GiB/day, 100GB/month@5")
    much, period, day = found.groups()
    into.bytes.bytes = size(much)
    into.bytes.period = _PERIODS[period.lower()] if period else Quota.NEVER
    into.bytes.reset_day = int(day or 0)


def _way(into: Limits, value: str) -> None:
    if value.lower() not in _WAYS:
        raise ValueError(f"way={value}: {value!r} is not one of {', '.join(_WAYS)}")
    into.bytes.way = _WAYS[value.lower()]


def _addresses(into: Limits, value: str) -> None:
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ValueError(f"{value!r} is not a number of addresses")
    into.addresses = int(value)


def _expires(into: Limits, value: str) -> None:
    into.expires_at = moment(value)


def _down(into: Limits, value: str) -> None:
    into.speed.down = speed(value)


def _up(into: Limits, value: str) -> None:
    into.speed.up = speed(value)


def _tell(into: Limits, value: str) -> None:
    for name in value.lower().split("+"):
        if name == "bytes":
            into.bytes.action = service_pb2.TELL
        elif name in ("addresses", "expires"):
            setattr(into, f"{name}_action", service_pb2.TELL)
        else:
            raise ValueError(f"tell={value}: {name!r} is not one of bytes, addresses, expires")


_READ: Mapping[str, Callable[[Limits, str], None]] = {
    "bytes": _bytes,
    "way": _way,
    "addresses": _addresses,
    "expires": _expires,
    "down": _down,
    "up": _up,
    "tell": _tell,
}
