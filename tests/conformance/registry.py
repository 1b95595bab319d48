"""Checks and their registry.

A module of checks binds its own `check` to a heading of docs/interface.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.conformance.context import Context


class Level(StrEnum):
    """Levels of conformance; each includes those before it."""

    CONTROLLERS = "controllers"
    BEYOND = "beyond"


class State(StrEnum):
    """The state that a check begins with."""

    # A core with one user, Anna, in every inbound.
    RUNNING = "running"
    # The same, with a user name that was never used before.
    UNCOUNTED = "uncounted"
    STOPPED = "stopped"


BOTH = ("rest", "grpc")


@dataclass(frozen=True)
class Check:
    """One check. `optional`: a node may reply that it lacks the operation."""

    # The anchor of a heading in docs/interface.md.
    section: str
    id: str
    level: Level
    title: str
    run: Callable[[Context], None]
    protocols: Sequence[str] = BOTH
    state: State = State.RUNNING
    optional: bool = False
    # The cores that support it.
    cores: Sequence[str] = ("xray", "sing-box")
    # Whether the node must be on this machine.
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
    """Decorator: register a function as the check of this name; its docstring is the title."""

    def register(run: Callable[[Context], None]) -> Callable[[Context], None]:
        assert name not in CHECKS, f"two checks are called {name}"
        assert run.__doc__
        title = " ".join(run.__doc__.split())
        CHECKS[name] = Check(section, name, level, title, run, protocols, state, optional, cores, local)
        return run

    return register
