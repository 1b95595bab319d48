"""What an operator may say of every core."""

from __future__ import annotations

import os
from pathlib import Path

from drivers.install.releases import Core
from drivers.process.memory import fault
from node.contract.settings import Setting, fault_of_address


def _fault_of_paths(text: str) -> str:
    """Why these directories cannot be what cores may read."""
    wrong = [word for word in text.split(os.pathsep) if word and not Path(word).is_absolute()]
    return f"{wrong[0]!r} is not an absolute path" if wrong else ""


CORE_PATHS = Setting(
    "CORE_PATHS",
    "directories, with `:` between them, whose files a configuration may name: certificates, lists, what is served",
    "/etc/letsencrypt",
    fault=_fault_of_paths,
)
CORE_ALLOW = Setting(
    "CORE_ALLOW", "what configurations may have beyond what the node knows, by commas (see configuration.md)"
)
CORE_MEMORY = Setting(
    "CORE_MEMORY",
    "how much memory a core may have of its own: bytes (`512M`, `2G`) or per cent of the machine's (`60%`); one that "
    "needs more ends, and is started again (default: no limit)",
    fault=fault,
)
ADOPT = Setting(
    "ADOPT",
    "on: cores live on when the node is killed, and the next node goes on with them: see docs/adopt.md",
    "off",
    choices=("on", "off"),
)
SETTINGS = (CORE_PATHS, CORE_ALLOW, CORE_MEMORY, ADOPT)


def executable_setting(core: Core) -> Setting:
    """What an operator sets to have another executable of this core."""
    text = f"the {core.title} to run (default: found on PATH or in the cores directory)"
    return Setting(core.variable("EXECUTABLE_PATH"), text)


def download_setting(core: Core) -> Setting:
    """What an operator sets to have archives of this core from elsewhere."""
    text = "a mirror: what stands before /v<version>/<archive> there"
    return Setting(core.variable("DOWNLOAD_URL"), text, core.url, fault=fault_of_address)
