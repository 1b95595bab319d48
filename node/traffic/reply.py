"""Serialises rows for a StatResponse by columns: thousands of message objects would cost more than all else. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, compress, repeat

from node.contract.counters import DIRECTIONS
from protos.columns_pb2 import Values
from protos.service_pb2 import Stat

# The serialised value field of a Stat: its tag, then a varint, whose bytes but the last have the highest bit set.
_VALUE = re.compile(rb"\x20[\x80-\xff]*[\x00-\x7f]")
_UP, _DOWN = (Stat(type=direction, link="traffic").SerializeToString() for direction in DIRECTIONS)


def packed(names: Sequence[str], ups: Sequence[int], downs: Sequence[int], zeros: bool) -> list[bytes]:
    """Serialise rows as two Stats each, one for each direction; Stats without bytes only with `zeros`.

    The rows come in columns: a tuple for each row would have Python collect garbage meanwhile.
    """
    heads, stats = [*map(_name, names)], [b""] * (2 * len(names))
    stats[::2] = map(b"".join, zip(heads, repeat(_UP), _values(ups), strict=False))
    stats[1::2] = map(b"".join, zip(heads, repeat(_DOWN), _values(downs), strict=False))
    return stats if zeros else [*compress(stats, chain.from_iterable(zip(ups, downs, strict=True)))]


def _values(values: Sequence[int]) -> list[bytes]:
    return _VALUE.findall(Values(value=values).SerializeToString())


def _name(name: str) -> bytes:
    """The serialised name field of a Stat."""
    raw = name.encode()
    return b"\n%c%b" % (len(raw), raw) if len(raw) < 128 else Stat(name=name).SerializeToString()
