"""Format numbers for people. Pure."""

from __future__ import annotations

_STEP = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
    """Bytes, in the largest unit that fits, with up to four digits."""
    for unit in _UNITS[:-1]:
        if abs(count) < _STEP:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    return f"{count:.1f} {_UNITS[-1]}"


def rate(count: float) -> str:
    return f"{size(count)}/s"


def rate_of_bits(count: int) -> str:
    """Bits per second in decimal units; empty for 0, no limit."""
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:g}{letter}"
    return str(count or "")


def span(seconds: int) -> str:
    """A duration in its two largest units."""
    units = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
    for at, (length, unit) in enumerate(units):
        if seconds >= length:
            rest = [(seconds % length) // units[at + 1][0], units[at + 1][1]] if at + 1 < len(units) else []
            more = f" {rest[0]} {rest[1]}" if rest and rest[0] else ""
            return f"{seconds // length} {unit}{more}"
    return "0 s"
