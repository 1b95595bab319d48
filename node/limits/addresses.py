"""Address limits: which addresses count as one, and which ones to disconnect above the limit. Pure."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from node.contract.connections import Address, Live

_BITS = {4: 32, 16: 128}


@dataclass(frozen=True)
class Grouping:
    """Counts addresses with the same prefix as one: an IPv6 household, or an IPv4 carrier's NAT pool."""

    ipv4: int = 32
    ipv6: int = 64

    def of(self, address: Address) -> Address:
        """The address of the group: the prefix, then zeros."""
        bits, kept = self._bits(address)
        if kept == bits:
            return address
        number = int.from_bytes(address) >> (bits - kept) << (bits - kept)
        return number.to_bytes(len(address))

    def shown(self, group: Address) -> str:
        """Format a group as an address, or as a network if it has more than one address."""
        bits, kept = self._bits(group)
        text = str(ipaddress.ip_address(group))
        return text if kept == bits else f"{text}/{kept}"

    def _bits(self, address: Address) -> tuple[int, int]:
        return _BITS[len(address)], self.ipv4 if len(address) == 4 else self.ipv6


def silences(connections: Iterable[Live], grouping: Grouping) -> dict[Address, float]:
    """Seconds without traffic by group: a group is as silent as its least silent connection."""
    silent: dict[Address, float] = {}
    for live in connections:
        group = grouping.of(live.address)
        silent[group] = min(live.silent, silent.get(group, math.inf))
    return silent


def giving_way(limit: int, grace: float, silent: Mapping[Address, float], order: Mapping[Address, int]) -> set[Address]:
    """Return the groups to disconnect, so that at most `limit` stay; 0 is no limit.

    Groups that were silent for longer than the grace go first, the most silent one before the others; then newcomers,
    the newest first. By age alone, four devices of a user with a limit of three would disconnect each other for ever.
    `order` numbers groups by arrival; a group that is not in it has just arrived.
    """
    excess = len(silent) - limit if limit else 0
    if excess <= 0:
        return set()

    def came(group: Address) -> tuple[float, float, Address]:
        return order.get(group, math.inf), silent[group], group

    dead = [group for group, seconds in silent.items() if seconds > grace]
    leaving = sorted(dead, key=lambda group: (silent[group], came(group)), reverse=True)[:excess]
    newest = sorted(silent.keys() - set(leaving), key=came, reverse=True)
    return {*leaving, *newest[: excess - len(leaving)]}
