"""Declaration of settings: the node's own are in `node.settings`, a driver's beside the driver."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


def fault_of_address(text: str) -> str:
    """Why this is no usable base URL; empty if it is. Does not repeat the URL: it may contain a password."""
    if not re.fullmatch(r"https?://[^\s/]\S*", text):
        return "it does not begin with https:// or http:// and a host"
    if "@" in text.split("/")[2]:
        return "it contains a user name or password, which jobs and logs would show: remove it"
    return ""


@dataclass(frozen=True)
class Setting:
    """One setting: its name in the environment, its texts, its default. A secret is never a command-line option.

    `text` is one line for `--help`: meaning, unit and range. `details` are full sentences for docs/settings.md: when to
    change it, and what follows. With `choices` the value is one of them, in upper or lower case. `fault` returns why a
    value cannot be used, or "".
    """

    name: str
    text: str
    default: str = ""
    secret: bool = False
    choices: tuple[str, ...] = ()
    fault: Callable[[str], str] | None = None
    details: str = ""

    @property
    def option(self) -> str:
        """The option of `twistd node`, without the dashes."""
        return self.name.lower().replace("_", "-")
