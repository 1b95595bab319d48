"""The settings of the keeper."""

from __future__ import annotations

from dataclasses import dataclass

from node.base.settings import Options, chosen, seconds, setting


@dataclass(frozen=True)
class HandoverOptions(Options):
    """Whether there is a keeper, and for how many seconds cores go on without a node.

    `node.handover.launch` reads KEEPER before all others.
    """

    adopt_seconds: float = setting("ADOPT_SECONDS", "300", seconds(1, 86_400)).help(
        "seconds that cores run on without a node before they are ended, 1 to 86400; not counted while a node starts",
        "Raise it if it can take longer until a node starts again. Nothing enforces limits in that time.",
    )
    keeper: bool = setting("KEEPER", "on", chosen("on", "off")).help(
        "on or off: a keeper starts the node again when it dies, and holds the cores meanwhile; see docs/upgrades.md",
        "Turn it off only for development: then a debugger reaches the node itself, and cores end with it.",
    )
