"""The settings of users' limits."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import tzinfo

from node.base.settings import Options, number, seconds, setting
from node.contract.connections import Address
from node.limits import parsing, periods, weights
from node.limits.limits import Defaults
from node.limits.weights import Rule, Weights
from protos.service_pb2 import Limits

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

    def read(self, shown: str) -> Address:
        """The group of an address or network."""
        return self.of(ipaddress.ip_network(shown).network_address.packed)

    def _bits(self, address: Address) -> tuple[int, int]:
        return _BITS[len(address)], self.ipv4 if len(address) == 4 else self.ipv6


@dataclass(frozen=True)
class LimitOptions(Options):
    """Limits of users without their own, and how addresses are counted. `grace` is in seconds."""

    all_users: Limits = setting("LIMITS", read=parsing.limits).help(
        "default limits of users without their own, such as addresses=3 down=100M bytes=500GB/month; see "
        "docs/limits.md",
        "Set it to limit users whose panel does not send limits.",
    )
    inbounds: Mapping[str, Limits] = setting("LIMITS_INBOUNDS", read=parsing.by_inbound).help(
        "default limits by inbound, which take precedence over LIMITS, such as free: down=2M; trial: addresses=1",
        "Set it if users of some inbounds have other limits than the rest.",
    )
    grace: float = setting("LIMIT_GRACE", "30", seconds(1, 600)).help(
        "seconds without traffic after which an address gives way to a new address of the same user, 1 to 600",
        "Lower it if users with an address limit wait too long when they change networks; raise it if quiet "
        "connections end too early.",
    )
    ipv4_prefix: int = setting("LIMIT_IPV4_PREFIX", "32", number(8, 32)).help(
        "length of a prefix: IPv4 addresses with this many leading bits in common count as one address, 8 to 32",
        "Set 24 where the NAT of a mobile carrier gives one phone a new address for each connection.",
    )
    ipv6_prefix: int = setting("LIMIT_IPV6_PREFIX", "64", number(32, 128)).help(
        "length of a prefix: IPv6 addresses with this many leading bits in common count as one address, 32 to 128",
        "64 is one household as a rule. Set 56 or 48 where providers hand out larger networks.",
    )
    zone: tzinfo = setting("TIMEZONE", "UTC", periods.zone).help(
        "time zone in which days, weeks and months of quotas and of NODE_QUOTA begin: a name such as Europe/Berlin",
        "Set the zone in which you sell a month, or your hoster bills one; days of the [bill](bill.md) begin there, "
        "too. See [limits.md](limits.md#when-a-period-begins) for summer time, and for a change of the zone.",
    )

    weights: tuple[Rule, ...] = setting("WEIGHTS", read=weights.rules).help(
        "factors by which users' bytes count towards their quotas, by inbound and hour, such as premium: 2; "
        "00:00-06:00: 0.5; see docs/limits.md",
        "Set it if some inbounds or hours are dearer than others. Rules for inbounds need USER_INBOUNDS=on. Hours are "
        "those of TIMEZONE. See [limits.md](limits.md#weights).",
    )

    @property
    def weighting(self) -> Weights:
        return Weights(self.weights, self.zone)

    @property
    def defaults(self) -> Defaults:
        return Defaults(self.all_users, self.inbounds, self.zone)

    @property
    def grouping(self) -> Grouping:
        return Grouping(self.ipv4_prefix, self.ipv6_prefix)
