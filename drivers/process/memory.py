"""How much memory a core may have of its own: what an operator says of it, and what its runtime is told."""

from __future__ import annotations

import os
import re

_AMOUNT = re.compile(r"([0-9]{1,12})([KMG%]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
# Less than this no core starts with.
LEAST = 128 * 1024**2
# Of what it may have, the part from which Go frees memory before it takes more: it needs room to do so.
_SOFT = 0.85


def amount(text: str, machine: int) -> int | None:
    """Bytes, of a number with K, M or G or per cent of what the machine has; None if it is neither."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return None
    number, unit = int(match[1]), match[2].upper()
    return number * machine // 100 if unit == "%" else number * _UNITS[unit]


def fault(text: str) -> str:
    """Why a setting cannot be used; empty if it can."""
    found = amount(text, _machine())
    if found is None:
        return f"{text!r} is no number of bytes (with K, M or G) and no per cent of the machine's memory"
    return f"{text!r} is less than {LEAST // 1024**2}M" if found < LEAST else ""


def allowed(text: str) -> int | None:
    """Bytes that a core may have by this setting; None where nothing is set."""
    return amount(text, _machine()) if text else None


def soft_limit(most: int | None) -> dict[str, str]:
    """What Go's runtime is told of it."""
    return {} if most is None else {"GOMEMLIMIT": str(int(most * _SOFT))}


def _machine() -> int:
    """Bytes of memory that there are."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
