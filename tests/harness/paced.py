"""An in-memory run whose users have connections, with support for rate limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from twisted.internet.task import Clock

from drivers.pretended.scripted import Gate, MemoryGeneration, MemoryPlan
from node.base.errors import CoreFailed
from node.contract.connections import Arrived, Handle, Live

HERE = b"\x7f\0\0\2"


class PacedGeneration(MemoryGeneration):
    """`flows` are its connections, `rates` and `windows` their limits; `doors` the rates of new ones by inbound."""

    def __init__(self, clock: Clock, *keys: str, tag: str = "a", paced: Mapping[str, str] | None = None) -> None:
        accounts = {tag: dict.fromkeys(keys, b"")}
        super().__init__(clock, MemoryPlan("", (tag,)), accounts, Gate())
        self.arrived: Arrived = lambda key, address: None
        self.unseen: Mapping[str, str] = {}
        self.mixed: Mapping[str, str] = {}
        self.unpaced: Mapping[str, str] = paced or {}
        self.flows: dict[Handle, Live] = {}
        self.rates: dict[Handle, int | None] = {}
        self.windows: dict[Handle, int | None] = {}
        self.doors: dict[str, int | None] = {}
        self.looks: list[set[str]] = []
        self.told: list[Mapping[Handle, int | None]] = []
        self.blind = self.deaf = False

    def connect(self, key: str, handle: Handle, tag: str = "a") -> None:
        """Add a user's connection and report it. It gets the rate of its inbound."""
        self.flows[handle] = Live(key, HERE, handle, round_trip=0.04)
        self.rates[handle] = self.doors.get(tag)
        self.arrived(key, HERE)

    def move(self, handle: Handle, **some: Any) -> None:
        """Change properties of a connection."""
        self.flows[handle] = self.flows[handle]._replace(**some)

    def disconnect(self, handle: Handle) -> None:
        del self.flows[handle]

    def may_carry(self, key: str) -> bool:
        return any(live.key == key for live in self.flows.values())

    async def look(self, keys: Collection[str]) -> list[Live]:
        self.looks.append({*keys})
        if self.blind:
            raise CoreFailed("the kernel does not list connections")
        return [live for live in self.flows.values() if live.key in keys]

    async def end(self, connections: Iterable[Live]) -> int:
        return sum(self.flows.pop(live.handle, None) is not None for live in connections)

    async def pace(self, rates: Mapping[Handle, int | None]) -> set[Handle]:
        self.told.append(rates)
        return self._set(self.rates, rates)

    async def pace_new(self, rates: Mapping[str, int | None]) -> bool:
        if not self.deaf:
            self.doors.update(rates)
        return not self.deaf

    async def narrow(self, windows: Mapping[Handle, int | None]) -> set[Handle]:
        return self._set(self.windows, windows)

    def _set(self, held: dict[Handle, int | None], wanted: Mapping[Handle, int | None]) -> set[Handle]:
        there = {handle: value for handle, value in wanted.items() if handle in self.flows}
        held.update(there)
        return {*there}
