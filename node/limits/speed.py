"""How fast each connection of a user may be, so that all of them together keep to the user's speed. Pure.

Bytes a second. A connection is known by whatever tells it from others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from node.contract.connections import Live

F = TypeVar("F", bound=Hashable)

# Bytes above which a connection has moved something since the last look: less is keeping it alive.
IDLE = 3000
# Looks in a row that found nothing moved, after which what waits for a client keeps no share: it has gone, or rests.
STILL = 10
# What each connection may have at least; slower, some clients take it for dead.
LEAST = 100
# How much more a connection may have before it is told.
SLACK = 1.02
# What is taken from a client at once: the kernel takes no less than about this, and by itself no more.
NARROWEST, WIDEST = 2048, 8 * 2**20
# Bounds of what windows are corrected by, in one step and in all.
STEP, ALL = 2.0, 16.0
# The part of a speed below which nobody is at it, and that of what windows let through below which it is not they that
# keep a client from more: rounds take longer than the shortest one, but hardly ever so much.
RESTING, FREE = 0.05, 1 / 8


class Seen(NamedTuple):
    """What a client had confirmed at a look, and for how many looks before it that had been as much."""

    sent: int = 0
    still: int = 0

    def is_busy(self, live: Live) -> bool:
        """Whether it would be faster if it could: something waits for the client, or much has moved since."""
        moved = live.sent - self.sent
        return moved > IDLE or (live.waiting > 0 and (moved > 0 or self.still < STILL))


UNSEEN = Seen()


def shares(limit: int, flows: Collection[F], at_work: AbstractSet[F]) -> dict[F, int]:
    """The rate of each. Who is at work shares all of it; one that is not can begin at once."""
    each, other = (max(LEAST, limit // max(1, len(some))) for some in (at_work, flows))
    return {flow: each if flow in at_work else other for flow in flows}


def changed(wanted: Mapping[F, int], held: Mapping[F, int]) -> dict[F, int]:
    """Those that are to be told: who gets less, and who gets clearly more."""
    return {flow: rate for flow, rate in wanted.items() if not rate / SLACK <= held.get(flow, 0) <= rate}


@dataclass
class Down(Generic[F]):
    """To what connections of users are held towards the clients, and what was seen of them last."""

    held: dict[F, int] = field(default_factory=dict)
    seen: dict[F, Seen] = field(default_factory=dict)

    def plan(self, limit: int, flows: Mapping[F, Live], new: bool) -> dict[F, int | None]:
        """What is to be set for the connections of one user; None: as fast as they can.

        Without a limit, and with `new` connections among them: for all, as these may be held to what their inbound is.
        """
        if not limit:
            return dict.fromkeys(flow for flow in flows if new or flow in self.held)
        # One alone has all of it, at work or not.
        at_work = self.at_work(flows) if len(flows) > 1 else set[F]()
        return {**changed(shares(limit, flows, at_work), self.held)}

    def at_work(self, flows: Mapping[F, Live]) -> set[F]:
        """Those that would be faster if they could."""
        return {flow for flow, live in flows.items() if self.seen.get(flow, UNSEEN).is_busy(live)}

    def look(self, flows: Mapping[F, Live]) -> list[F]:
        """This is what there is. Returns those that were held to something and are nobody's now, if they are at all."""
        before, self.seen = self.seen, {}
        for flow, live in flows.items():
            sent, still = before.get(flow, UNSEEN)
            self.seen[flow] = Seen(live.sent, still + 1 if live.sent == sent else 0)
        return _lose(self.held, flows)


@dataclass
class Up(Generic[F]):
    """The same from the clients, by how much is taken from them at once.

    How long a round takes in truth is not known, so what comes of a window is measured, and windows follow.
    """

    held: dict[F, int] = field(default_factory=dict)
    seen: dict[F, int] = field(default_factory=dict)
    # By user, what windows are to be multiplied by.
    factors: dict[str, float] = field(default_factory=dict)

    def plan(self, key: str, limit: int, flows: Mapping[F, Live], seconds: float) -> dict[F, int | None]:
        """The windows that are to be set for the connections of one user, `seconds` after the last look."""
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
        """This is what these users have, who are all that have a speed."""
        self.seen = {flow: live.received for flow, live in flows.items()}
        self.factors = {key: factor for key, factor in self.factors.items() if key in users}

    def lose(self, flows: Mapping[F, Live]) -> list[F]:
        """This is all that there is. Returns those that were held to something and are not in it."""
        return _lose(self.held, flows)


def _lose(held: dict[F, int], flows: Mapping[F, Live]) -> list[F]:
    lost = [flow for flow in held if flow not in flows]
    for flow in lost:
        del held[flow]
    return lost


def corrected(factor: float, limit: int, measured: float) -> float:
    """What windows are to be multiplied by, when with `factor` this was measured."""
    if measured < RESTING * limit:
        return 1.0
    if measured < FREE * factor * limit:
        return factor
    step = min(max(math.sqrt(limit / measured), 1 / STEP), STEP)
    return min(max(factor * step, 1 / ALL), ALL)


def window(rate: int, round_trip: float, factor: float) -> int:
    """What may be under way from a client at once that is to be as fast as this."""
    return min(max(int(rate * round_trip * factor), NARROWEST), WIDEST)
