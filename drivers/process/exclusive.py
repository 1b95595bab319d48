"""Texts for parts of a configuration that only one process at a time can have, for an operator."""

from __future__ import annotations


def interface(tag: str) -> str:
    return f"only one process can have the network interface of {tag!r}"


def wireguard(tag: str) -> str:
    """With two processes, peers answer the one that sent last, and connections of the other hang."""
    return f"only one process can use the WireGuard key of {tag!r}: its peers answer the process that sent last"
