"""Parse CORE_MEMORY, the limit of a core's own memory, and derive the soft limit of Go's run-time."""

from __future__ import annotations

import os
import re

_AMOUNT = re.compile(r"([0-9]{1,12})([KMG%]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
# The least allowed value: no core starts with less.
LEAST = 128 * 1024**2
# GOMEMLIMIT as a part of the limit: from there on Go frees memory before it takes more, and needs room for that.
_SOFT = 0.85


def amount(text: str, machine: int) -> int | None:
    """Parse a number with K, M or G, or a percentage of the machine's memory, to bytes; None if it is neither."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return None
    number, unit = int(match[1]), match[2].upper()
    return number * machine // 100 if unit == "%" else number * _UNITS[unit]


def fault(text: str) -> str:
    """Return why a value of the setting is invalid; empty if it is valid."""
    found = amount(text, _machine())
    if found is None:
        return f"{text!r} is no number of bytes (with K, M or G) and no per cent of the machine's memory"
    return f"{text!r} is less than {LEAST // 1024**2}M" if found < LEAST else ""


def allowed(text: str) -> int | None:
    """Return the limit in bytes; None if nothing is set."""
    return amount(text, _machine()) if text else None


def soft_limit(most: int | None) -> dict[str, str]:
    """Return the environment variable for Go's run-time."""
    return {} if most is None else {"GOMEMLIMIT": str(int(most * _SOFT))}


def _machine() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
