"""The keeper outlives the node, with processes of cores and descriptors by name. See `node.handover.keeper`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple


class Spawned(NamedTuple):
    """A process of the keeper: its PID, a pidfd, its outputs to read by their numbers in it, whether it has ended."""

    pid: int
    pidfd: int
    outputs: Mapping[int, int]
    ended: bool = False


class Keeper:
    """The keeper as the node sees it. This one is for KEEPER=off: it holds nothing, and cores end with the node.

    Safe to call from any thread, but for `when_exited`. All raise `OSError` if the keeper does not answer.
    """

    # Whether it really outlives the node: else it spawns nothing.
    lasts = False

    def spawn(self, argv: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]) -> Spawned:
        """Start a process that may outlive the node. `descriptors` maps its numbers to ours."""
        raise NotImplementedError

    def spawned(self, pid: int) -> Spawned | None:
        """Take over a process that an earlier node has started; None if the keeper does not know it."""

    def when_exited(self, pid: int, exited: Callable[[int], None]) -> None:
        """Call `exited` with the wait status of a process when it has ended, or soon if it has."""

    def forget(self, pid: int) -> None:
        """Have the keeper forget a process. It is killed if it still runs."""

    def put(self, name: str, descriptors: Sequence[int]) -> None:
        """Have the keeper hold duplicates of these, in place of those that it holds by this name."""

    def take(self, name: str) -> list[int]:
        """Descriptors that were held for this node when it began: the caller owns them. Empty for an unknown name."""
        return []

    def drop(self, names: Collection[str]) -> None:
        """Have the keeper close what it holds by these names. It is closed when this returns."""
