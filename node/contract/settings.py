"""How a setting is declared: the node's own in `node.settings`, a driver's beside the driver."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


def fault_of_address(text: str) -> str:
    """Why nothing can be fetched from below this address, or nothing. Does not repeat it: there may be a password."""
    if not re.fullmatch(r"https?://[^\s/]\S*", text):
        return "it does not begin with https:// or http://, and a host"
    if "@" in text.split("/")[2]:
        return "it has a name or a password in it, which are not sent: jobs and logs would show them"
    return ""


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
