"""Bytes by name from the rows of GetStats, and their rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from node.nodectl.running import Node, Work
from protos import service_pb2 as pb

KINDS = {"users": pb.UsersStat, "inbounds": pb.Inbounds, "outbounds": pb.Outbounds}
ONE = {"users": pb.UserStat, "inbounds": pb.Inbound, "outbounds": pb.Outbound}


def traffic(kind: str, name: str = "", reset: bool = False) -> Work[pb.StatResponse]:
    """Work that reads the rows of a kind from a node, or only those of one name."""

    async def ask(node: Node) -> pb.StatResponse:
        return await node.client.stats(ONE[kind] if name else KINDS[kind], name, reset)

    return ask


class Bytes(NamedTuple):
    """From users, and to them."""

    uplink: int = 0
    downlink: int = 0

    @property
    def both(self) -> int:
        return self.uplink + self.downlink


class Rate(NamedTuple):
    """Bytes a second."""

    uplink: float = 0.0
    downlink: float = 0.0

    @property
    def both(self) -> float:
        return self.uplink + self.downlink


def by_name(rows: Iterable[pb.Stat]) -> dict[str, Bytes]:
    found: dict[str, Bytes] = {}
    for row in rows:
        before = found.get(row.name, Bytes())
        if row.type == "uplink":
            found[row.name] = before._replace(uplink=row.value)
        elif row.type == "downlink":
            found[row.name] = before._replace(downlink=row.value)
    return found


def rates(before: Mapping[str, Bytes], now: Mapping[str, Bytes], seconds: float) -> dict[str, Rate]:
    """The rates between two readings. A new name has a rate of zero: when it began is not known."""
    return {name: _rate(before.get(name, count), count, seconds) for name, count in now.items()}


def _rate(before: Bytes, now: Bytes, seconds: float) -> Rate:
    return Rate(_grown(before.uplink, now.uplink) / seconds, _grown(before.downlink, now.downlink) / seconds)


def _grown(before: int, now: int) -> int:
    """The growth of a counter. If it was reset meanwhile, only what it has now is known."""
    return now - before if now >= before else now
