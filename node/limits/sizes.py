"""Parser for sizes in bytes. Pure."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {letter: number for number, letter in enumerate("kmgtp", 1)}
_SIZE = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,9}))?\s*(?:([kmgtp])(i)?)?b?", re.IGNORECASE)
# The largest number that a message and the state file can hold.
MOST = 2**63 - 1


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
