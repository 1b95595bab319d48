"""Who is connected to the cores that serve, draining ones included; tells the limits what concerns connections."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from node.base.errors import CoreFailed
from node.contract.connections import Address, Live, Paces, SeesConnections
from node.contract.driver import Generation
from node.contract.generations import Follower, Generations
from node.limits.in_force import InForce

Run = TypeVar("Run", bound=SeesConnections)


class PacedRun(Generation, Paces, Protocol):
    """A core whose connections can be paced."""


class Watcher:
    """A limit that concerns connections. A subclass overrides what it has to know."""

    def arrived(self, key: str, address: Address) -> None:
        """Called when the user has a new connection, or one that the core has just reported."""

    def changed(self, keys: Collection[str]) -> None:
        """Called when these users came or went, or may have other limits."""

    def cores_changed(self) -> None:
        """Called when a core came or went."""


class Connections(Follower):
    """The cores that see the connections of users: `runs`, and of these `paced`, whose connections can be paced.

    `blind`: some core that serves cannot attribute connections to users.
    """

    def __init__(self, generations: Generations, in_force: InForce) -> None:
        self._generations = generations
        self._in_force = in_force
        self._watchers: list[Watcher] = []
        self._listening = False
        self.runs: Sequence[SeesConnections] = ()
        self.paced: Sequence[PacedRun] = ()
        self.blind = False
        # The core that serves new connections.
        self.current: Generation | None = None
        generations.follow(self)

    def watch(self, watcher: Watcher) -> None:
        """Tell this limit from now on."""
        self._watchers.append(watcher)

    def may_carry(self, key: str) -> bool:
        """Whether the user may have a connection, as far as the cores know."""
        return any(run.may_carry(key) for run in self.runs)

    def changed(self, keys: Collection[str]) -> None:
        """Tell all limits that these users came or went, or may have other limits."""
        if not self._listening:
            self._listen()
        for watcher in self._watchers:
            watcher.changed(keys)

    def moved(self) -> None:
        serving = self._generations.serving
        self.runs = [run for run in serving if isinstance(run, SeesConnections)]
        self.paced = [run for run in serving if isinstance(run, Paces)]
        self.blind = len(self.runs) < len(serving)
        self.current = self._generations.current
        self._listen()
        for watcher in self._watchers:
            watcher.cores_changed()

    def _listen(self) -> None:
        """Have the cores report new connections once any user has limits; before that the cost is saved."""
        if self._in_force.any:
            for run in self.runs:
                run.arrived = self._arrived
            self._listening = True

    def _arrived(self, key: str, address: Address) -> None:
        for watcher in self._watchers:
            watcher.arrived(key, address)


async def look(runs: Iterable[Run], keys: Collection[str]) -> tuple[list[tuple[Run, list[Live]]], list[CoreFailed]]:
    """Return the connections of these users by core, and the failures of cores that did not answer."""
    found, faults = [], []
    for run in runs:
        carrying = {key for key in keys if run.may_carry(key)}
        try:
            connections = await run.look(carrying) if carrying else []
        except CoreFailed as error:
            faults.append(error)
        else:
            found.append((run, [live for live in connections if live.key in carrying]))
    return found, faults
