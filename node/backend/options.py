"""The settings of the backend."""

from __future__ import annotations

from dataclasses import dataclass

from node.base.settings import Options, chosen, number, seconds, setting


@dataclass(frozen=True)
class BackendOptions(Options):
    """How long a stopped or replaced core goes on; when a backend begins and ends by itself. Times are in seconds."""

    stop_grace: int = setting("STOP_GRACE", "30", number(0, 3600)).help(
        "seconds that a core goes on after a Stop with x-api-key, so that the next Start can take it back, 0 to 3600",
        "Without it a panel that sends Stop and then Start disconnects all users. 0 ends the core at once.",
    )
    drain_timeout: float = setting("DRAIN_TIMEOUT", "600", seconds(1, 86_400)).help(
        "seconds that connections may stay on a core that was replaced, 1 to 86400",
        "After that the old core ends, and its connections with it. Raise it for long sessions; lower it where "
        "memory is short.",
    )
    drain_generations: int = setting("DRAIN_GENERATIONS", "64", number(0, 1000)).help(
        "replaced cores that may drain at once, as far as memory allows, 0 to 1000; 0: restart the core instead",
        "Above this number the draining core with the fewest connections ends. Lower it where memory is short. "
        "With 0 each change that needs a new core ends all connections.",
    )
    upgrade: bool = setting("UPGRADE_ON_START", "off", chosen("on", "off")).help(
        "on or off: a Start with the running configuration replaces a core whose executable or geo files have changed "
        "on disk",
        "Off, such a Start keeps the running core. Turn it on if you replace these files yourself and want the "
        "next Start of the panel to bring them in.",
    )
    outlive: bool = setting("KEEP_ALIVE_ACTION", "stop", chosen("keep", "stop")).help(
        "what the node does with the core when no controller has called for the keep-alive of its Start: stop or keep",
        "Set `keep` if users should stay connected while the panel is away.",
    )
    resume: bool = setting("RESUME", "on", chosen("on", "off")).help(
        "on or off: when the node starts, start the last backend again, with its users",
        "Turn it off if only controllers may start a core: then a restarted node waits for a Start.",
    )
