"""Sizes as people write them. Pure."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {letter: number for number, letter in enumerate("kmgtp", 1)}
_SIZE = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,9}))?\s*(?:([kmgtp])(i)?)?b?", re.IGNORECASE)
# More bytes than anybody counts: what a message and the state file can hold.
MOST = 2**63 - 1


def size(text: str) -> int:
    """Bytes: `2TB` and `2T` are decimal, `500GiB` and `500Gi` binary, a number alone is bytes.

    Raises `ValueError` for what is no size, or no number of whole bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size: write 2TB, 500GiB or a number of bytes")
    whole, part, unit, binary = found.groups()
    factor = (1024 if binary else 1000) ** (_UNITS[unit.lower()] if unit else 0)
    count = Fraction(f"{whole}.{part or 0}") * factor
    if count.denominator != 1 or count > MOST:
        raise ValueError(f"{text!r} is no number of whole bytes below 8 EiB")
    return int(count)
