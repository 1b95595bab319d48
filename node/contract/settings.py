"""How a setting is declared: the node's own in `node.settings`, a driver's beside the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """One setting: its name in the environment, what it is for, its default. A secret is never an option.

    With `choices` its value is one of them, in any case. `fault` says why one that was set cannot be used, or nothing.
    """

    name: str
    text: str
    default: str = ""
    secret: bool = False
    choices: tuple[str, ...] = ()
    fault: Callable[[str], str] | None = None

    @property
    def option(self) -> str:
        return self.name.lower().replace("_", "-")
