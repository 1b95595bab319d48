"""What outlives the node of a user's limits, as it lies on disk. Pure."""

from __future__ import annotations

from typing import NamedTuple

from node.limits.count import MOST, Count
from protos.kept_pb2 import KeptLimits


class Word(NamedTuple):
    """What SetLimits said of a user, packed, and what their own message said then: with another one it is over."""

    limits: bytes
    over: bytes


def pack(word: Word | None, count: Count | None) -> bytes:
    """Both as one record."""
    kept = KeptLimits()
    if word is not None:
        kept.word, kept.over = word
    if count is not None:
        kept.since = -1 if count.since is None else count.since
        kept.began, kept.before = count.began, count.before
        kept.up, kept.down = min(count.up, MOST), min(count.down, MOST)
        kept.near, kept.reached, kept.expired = count.near, count.reached, count.expired
        kept.off_since, kept.gone_since = count.off_since, count.gone_since
        kept.ahead = count.ahead
    return kept.SerializeToString()


def unpack(packed: bytes) -> tuple[Word | None, Count | None]:
    """What was packed."""
    kept = KeptLimits.FromString(packed)
    word = Word(kept.word, kept.over) if kept.HasField("word") else None
    if not kept.began:
        return word, None
    return word, Count(
        began=kept.began,
        since=None if kept.since == -1 else kept.since,
        before=kept.before,
        up=kept.up,
        down=kept.down,
        near=kept.near,
        reached=kept.reached,
        expired=kept.expired,
        off_since=kept.off_since,
        gone_since=kept.gone_since,
        ahead=kept.ahead,
    )
