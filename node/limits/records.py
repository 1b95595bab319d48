"""The record of a user's limits and usage in the state file. Pure."""

from __future__ import annotations

from typing import NamedTuple

from node.limits.count import MOST, Count
from protos.kept_pb2 import KeptLimits


class Override(NamedTuple):
    """An override by SetLimits, packed, and the limits of the user's own message at that time.

    It holds until the user's own message says something else.
    """

    limits: bytes
    own: bytes


def pack(override: Override | None, count: Count | None) -> bytes:
    """Serialize both as one record."""
    kept = KeptLimits()
    if override is not None:
        kept.word, kept.over = override
    if count is not None:
        kept.since = -1 if count.since is None else count.since
        kept.began, kept.before = count.began, count.before
        kept.up, kept.down = min(count.up, MOST), min(count.down, MOST)
        kept.near, kept.reached, kept.expired = count.near, count.reached, count.expired
        kept.off_since, kept.gone_since = count.off_since, count.gone_since
        kept.ahead = count.ahead
    return kept.SerializeToString()


def unpack(packed: bytes) -> tuple[Override | None, Count | None]:
    """Parse a record."""
    kept = KeptLimits.FromString(packed)
    override = Override(kept.word, kept.over) if kept.HasField("word") else None
    if not kept.began:
        return override, None
    return override, Count(
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
