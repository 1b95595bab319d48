"""What stands of the core at one moment: the runs that one program of the node leaves to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node.backend.desired import Accepted
from node.contract.driver import Generation


@dataclass(frozen=True)
class Drainer:
    """A run that drains, of what was accepted then, and since when.

    `way_back`: for how many seconds the current one may still give way to it, if it may.
    """

    run: Generation
    accepted: Accepted
    since: float
    way_back: float | None = None


@dataclass(frozen=True)
class Standing:
    """The current run, and those that drain, oldest first."""

    current: Generation
    accepted: Accepted
    draining: Sequence[Drainer]
