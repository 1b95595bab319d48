"""Shares a user's speed limit among their connections. Pure.

Speeds are in bytes a second. A connection (flow) is any hashable value that identifies it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from node.contract.connections import Live

F = TypeVar("F", bound=Hashable)

# Bytes since the last round up to which a connection counts as idle: keep-alive packets.
IDLE = 3000
# Rounds without progress after which a connection with data waiting counts as idle: its client is gone or paused.
STILL = 10
# Lowest speed of a connection; below it some clients take the connection for dead.
LEAST = 100
# Factor by which a connection's allowed speed may grow before it is set again.
SLACK = 1.02
# Smallest and largest receive window: about the least that the kernel allows, and the most that it takes by default.
NARROWEST, WIDEST = 2048, 8 * 2**20
# Largest correction of windows in one step, and in total.
STEP, ALL = 2.0, 16.0
# The part of a user's speed below which they count as idle; and the part of what windows should let through below which
# something else slows the client: round trips take longer than the shortest one, but hardly ever by as much.
RESTING, FREE = 0.05, 1 / 8


class Seen(NamedTuple):
    """Bytes that a client had confirmed at a round, and for how many rounds before that number had not changed."""

    sent: int = 0
    still: int = 0

    def is_busy(self, live: Live) -> bool:
        """Whether the connection would use more speed: data waits for the client, or much has moved since."""
        moved = live.sent - self.sent
        return moved > IDLE or (live.waiting > 0 and (moved > 0 or self.still < STILL))


UNSEEN = Seen()


def shares(limit: int, flows: Collection[F], at_work: AbstractSet[F]) -> dict[F, int]:
    """The speed of each connection. Busy ones share the whole limit; an idle one gets an even part to start with."""
    each, other = (max(LEAST, limit // max(1, len(some))) for some in (at_work, flows))
    return {flow: each if flow in at_work else other for flow in flows}


def changed(wanted: Mapping[F, int], held: Mapping[F, int]) -> dict[F, int]:
    """The values that have to be set: those that fall, and those that grow by more than SLACK."""
    return {flow: rate for flow, rate in wanted.items() if not rate / SLACK <= held.get(flow, 0) <= rate}


@dataclass
class Held(Generic[F]):
    """The speed or window that each connection is held to."""

    held: dict[F, int] = field(default_factory=dict)

    def lose(self, flows: Mapping[F, Live]) -> list[F]:
        """Given all connections, forget and return those that were held and are not among them."""
        lost = [flow for flow in self.held if flow not in flows]
        for flow in lost:
            del self.held[flow]
        return lost


@dataclass
class Down(Held[F]):
    """Download: the speed that each connection is held to, and its progress at the last round."""

    seen: dict[F, Seen] = field(default_factory=dict)

    def plan(self, limit: int, flows: Mapping[F, Live], new: bool) -> dict[F, int | None]:
        """Return the speeds to set for the connections of one user; None: no limit.

        Without a limit and with `new` connections among them, all are set, as these may have the pace of their inbound.
        """
        if not limit:
            return dict.fromkeys(flow for flow in flows if new or flow in self.held)
        # A single connection gets the whole limit, busy or idle.
        at_work = self.at_work(flows) if len(flows) > 1 else set[F]()
        return {**changed(shares(limit, flows, at_work), self.held)}

    def at_work(self, flows: Mapping[F, Live]) -> set[F]:
        """The busy connections."""
        return {flow for flow, live in flows.items() if self.seen.get(flow, UNSEEN).is_busy(live)}

    def look(self, flows: Mapping[F, Live]) -> None:
        """Note the progress of all connections."""
        before, self.seen = self.seen, {}
        for flow, live in flows.items():
            sent, still = before.get(flow, UNSEEN)
            self.seen[flow] = Seen(live.sent, still + 1 if live.sent == sent else 0)


@dataclass
class Up(Held[F]):
    """Upload: limits the speed from clients by the receive windows of their connections.

    The true round trip is not known, so the resulting speed is measured and the windows are corrected.
    """

    seen: dict[F, int] = field(default_factory=dict)
    # By user, the factor for the windows.
    factors: dict[str, float] = field(default_factory=dict)

    def plan(self, key: str, limit: int, flows: Mapping[F, Live], seconds: float) -> dict[F, int | None]:
        """Return the windows to set for the connections of one user, `seconds` after the last round."""
        if not limit:
            self.factors.pop(key, None)
            return dict.fromkeys(flow for flow in flows if flow in self.held)
        moved = {flow: live.received - self.seen[flow] for flow, live in flows.items() if flow in self.seen}
        if seconds > 0 and moved:
            self.factors[key] = corrected(self.factors.get(key, 1.0), limit, sum(moved.values()) / seconds)
        at_work = {flow for flow, some in moved.items() if some > IDLE}
        factor = self.factors.get(key, 1.0)
        windows = {
            flow: window(rate, flows[flow].round_trip, factor) for flow, rate in shares(limit, flows, at_work).items()
        }
        return {**changed(windows, self.held)}

    def look(self, flows: Mapping[F, Live], users: Collection[str]) -> None:
        """Note the progress of these users, who are all users with an upload limit."""
        self.seen = {flow: live.received for flow, live in flows.items()}
        self.factors = {key: factor for key, factor in self.factors.items() if key in users}


def corrected(factor: float, limit: int, measured: float) -> float:
    """The next factor for windows, if `factor` led to the `measured` speed."""
    if measured < RESTING * limit:
        return 1.0
    if measured < FREE * factor * limit:
        return factor
    step = min(max(math.sqrt(limit / measured), 1 / STEP), STEP)
    return min(max(factor * step, 1 / ALL), ALL)


def window(rate: int, round_trip: float, factor: float) -> int:
    """The receive window in bytes for a client that may send at this rate."""
    return min(max(int(rate * round_trip * factor), NARROWEST), WIDEST)
