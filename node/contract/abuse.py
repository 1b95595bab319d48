"""Abuse: what the operator wants done about which kind of traffic, and the requests of users that a run reports."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

from node.contract.connections import Address

MAIL_PORT = 25
# Ports of UDP trackers, and those on which BitTorrent clients listen by default.
TORRENT_PORTS = frozenset({*range(6881, 6890), 6969})


class Kind(StrEnum):
    """A kind of abuse. The value is the word in ABUSE."""

    TORRENT = "torrent"
    SCAN = "scan"
    MAIL = "mail"


class Action(StrEnum):
    """What the node does about it. The value is the word in ABUSE."""

    OFF = "off"
    TELL = "tell"
    BLOCK = "block"
    SLOW = "slow"
    CUT = "cut"


class Rule(NamedTuple):
    """An action; for SLOW the bits a second, and for SLOW and CUT the seconds."""

    action: Action
    seconds: int = 0
    speed: int = 0


OFF = Rule(Action.OFF)
ByKind = Mapping[Kind, Rule]


@dataclass(frozen=True)
class AbuseRules:
    """The rules of all inbounds, and by inbound tag, which take precedence.

    `exempt`: keys of users whom no rule concerns. `sniffs`: inbounds that sniff nothing may be made to.
    """

    everywhere: ByKind = field(default_factory=dict)
    inbounds: Mapping[str, ByKind] = field(default_factory=dict)
    exempt: frozenset[str] = frozenset()
    sniffs: bool = False

    def __bool__(self) -> bool:
        return any(rule != OFF for some in (self.everywhere, *self.inbounds.values()) for rule in some.values())

    @property
    def number(self) -> int:
        """Another one for rules that add something else to a configuration; 0 for none."""
        if not self:
            return 0
        tags, kinds = sorted(self.inbounds), (Kind.TORRENT, Kind.MAIL)
        passed = {Action.SLOW: Action.TELL, Action.CUT: Action.TELL}
        actions = [self.of(tag, kind).action for tag in (*tags, "") for kind in kinds]
        added = [passed.get(action, action) for action in actions], tags, sorted(self.exempt), self.sniffs
        return zlib.crc32(repr(added).encode())

    def of(self, tag: str, kind: Kind) -> Rule:
        return self.inbounds.get(tag, {}).get(kind) or self.everywhere.get(kind, OFF)

    def blocked(self, kind: Kind, tags: Iterable[str]) -> list[str]:
        """Those of the inbounds where the core blocks this kind."""
        return [tag for tag in tags if self.of(tag, kind).action is Action.BLOCK]

    def reported(self, kind: Kind, tags: Iterable[str]) -> list[str]:
        """Those of the inbounds where this kind is reported and passes."""
        return [tag for tag in tags if self.of(tag, kind).action not in (Action.OFF, Action.BLOCK)]


NO_RULES = AbuseRules()


class Request(NamedTuple):
    """A user asked for a target, as HOST:PORT, through an inbound.

    `torrent`: the core recognised BitTorrent. `answered`: the target has answered, as far as the core reports that.
    """

    key: str
    address: Address
    tag: str
    target: str
    udp: bool
    torrent: bool = False
    answered: bool = False


@runtime_checkable
class SeesRequests(Protocol):
    """A generation that reports the requests of users."""

    def requests(self, exempt: Collection[str]) -> Sequence[Request]:
        """The requests since the last call, without those of these users. The first call begins to collect them."""
