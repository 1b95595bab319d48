"""Which addresses count as one, and which give way where a user is connected from more than they may. Pure."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from node.contract.connections import Address, Live

_BITS = {4: 32, 16: 128}


@dataclass(frozen=True)
class Grouping:
    """Addresses with the same first bits are one: a household by IPv6, what a carrier's NAT hides by IPv4."""

    ipv4: int = 32
    ipv6: int = 64

    def of(self, address: Address) -> Address:
        """The address that stands for all of its group: its own first bits, then zeros."""
        bits, kept = self._bits(address)
        if kept == bits:
            return address
        number = int.from_bytes(address) >> (bits - kept) << (bits - kept)
        return number.to_bytes(len(address))

    def shown(self, group: Address) -> str:
        """For people: the address, or the network where it stands for more than one."""
        bits, kept = self._bits(group)
        text = str(ipaddress.ip_address(group))
        return text if kept == bits else f"{text}/{kept}"

    def _bits(self, address: Address) -> tuple[int, int]:
        return _BITS[len(address)], self.ipv4 if len(address) == 4 else self.ipv6


def silences(connections: Iterable[Live], grouping: Grouping) -> dict[Address, float]:
    """By group, for how long nothing came from it: an address is as silent as its least silent connection."""
    silent: dict[Address, float] = {}
    for live in connections:
        group = grouping.of(live.address)
        silent[group] = min(live.silent, silent.get(group, math.inf))
    return silent


def giving_way(limit: int, grace: float, silent: Mapping[Address, float], order: Mapping[Address, int]) -> set[Address]:
    """The groups whose connections are to be ended, so that no more than `limit` stay; 0 is no limit.

    Whoever is silent for longer than the grace gives way, the most silent first; then the newcomers, the last first.
    By age alone, four devices of a user who may have three would throw each other out for ever. `order` numbers groups
    as they came; one that is not in it has come just now.
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
