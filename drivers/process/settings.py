"""What an operator may say of every core."""

from __future__ import annotations

from drivers.install.releases import Core
from node.contract.settings import Setting


def executable_setting(core: Core) -> Setting:
    """What an operator sets to have another executable of this core."""
    text = f"the {core.title} to run (default: found on PATH or in the cores directory)"
    return Setting(core.variable("EXECUTABLE_PATH"), text)
