"""What of a configuration only one process at a time can have, in words for an operator."""

from __future__ import annotations


def interface(tag: str) -> str:
    return f"the network interface of {tag!r} can be in one process at a time"


def wireguard(tag: str) -> str:
    """With two, the peer's answers go to whichever spoke last, and the other one's connections hang."""
    return f"the WireGuard key of {tag!r} can be live in one process only: its peers answer the one that spoke last"
