"""Find the sing-box executable on this machine, and what it was built with."""

from __future__ import annotations

from drivers.install.releases import SING_BOX
from drivers.process.executable import Executable, Installation
from node.contract.driver import Host

# The first version with the api service.
OLDEST = (1, 14)


def installation(host: Host) -> Installation:
    return Installation(host, SING_BOX, oldest=OLDEST)


def counts(executable: Executable) -> bool:
    """Whether the executable was built with v2ray_api, whose counters are exact."""
    tags = next((line.removeprefix("Tags: ") for line in executable.lines if line.startswith("Tags: ")), "")
    return "with_v2ray_api" in tags.split(",")
