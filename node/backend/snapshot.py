"""A snapshot of the core's runs, which one node process hands over to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node.backend.desired import Accepted
from node.contract.driver import Generation


@dataclass(frozen=True)
class DrainingRun:
    """A draining run, the backend accepted for it, and when it began to drain.

    `since` is None if it drains from now on. `way_back`: seconds for which the node may still go back from the current
    run to it; None: it may not.
    """

    run: Generation
    accepted: Accepted
    since: float | None
    way_back: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """The current run, None if it has ended, and the draining ones, oldest first; those that take over are last.

    `accepted`: the backend of the current run, or the wanted one.
    """

    current: Generation | None
    accepted: Accepted
    draining: Sequence[DrainingRun]
