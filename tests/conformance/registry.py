"""What a check is, and where all of them are gathered.

A module of checks makes its own `check` of the one here, with the heading of docs/interface.md that it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.conformance.context import Context


class Level(StrEnum):
    """What a node can be held to; each level has those before it."""

    CONTROLLERS = "controllers"
    BEYOND = "beyond"


class State(StrEnum):
    """What a check begins with."""

    # A core with one user, Anna, in every inbound.
    RUNNING = "running"
    # The same, under names for which nothing was ever counted.
    UNCOUNTED = "uncounted"
    STOPPED = "stopped"


BOTH = ("rest", "grpc")


@dataclass(frozen=True)
class Check:
    """One thing that holds or not. `optional`: a node may lack the operations, and says so."""

    # A heading of docs/interface.md, as links name it.
    section: str
    id: str
    level: Level
    title: str
    run: Callable[[Context], None]
    protocols: Sequence[str] = BOTH
    state: State = State.RUNNING
    optional: bool = False
    # Cores that have what it needs.
    cores: Sequence[str] = ("xray", "sing-box")
    # It needs the node to be on this machine.
    local: bool = False


CHECKS: dict[str, Check] = {}


def check(
    section: str,
    name: str,
    level: Level,
    protocols: Sequence[str] = BOTH,
    state: State = State.RUNNING,
    optional: bool = False,
    cores: Sequence[str] = ("xray", "sing-box"),
    local: bool = False,
) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """The function below is the check of this name; its documentation is the title."""

    def register(run: Callable[[Context], None]) -> Callable[[Context], None]:
        assert name not in CHECKS, f"two checks are called {name}"
        assert run.__doc__
        title = " ".join(run.__doc__.split())
        CHECKS[name] = Check(section, name, level, title, run, protocols, state, optional, cores, local)
        return run

    return register
