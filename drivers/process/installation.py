"""Where a core's executable is, asked off the reactor's back."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.threads import deferToThreadPool

from drivers.install.install import find
from drivers.install.releases import InstallError, choose
from node.contract.driver import Host
from node.errors import CoreFailed


async def located(host: Host, name: str) -> Path:
    """The executable of this core: configured, on PATH or installed. Raises `CoreFailed` with what to do."""
    core = choose(name)
    configured = host.settings.get(core.variable("EXECUTABLE_PATH")) or None
    try:
        found = await deferToThreadPool(host.reactor, host.reactor.getThreadPool(), find, core, configured)
    except InstallError as fault:
        raise CoreFailed(str(fault)) from fault
    if found is None:
        raise CoreFailed(f"there is no {core.title} on this machine: run `python -m drivers.install {core.name}`")
    return found
