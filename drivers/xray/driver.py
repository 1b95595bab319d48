"""The Xray driver: a configuration is converted by the core itself and taken over."""

from __future__ import annotations

from drivers import json_text
from drivers.process import readiness as starting
from drivers.process.orphans import sweep
from drivers.sockets.sharing import Sharing
from drivers.xray import config
from drivers.xray.executable import SETTINGS, installation
from drivers.xray.plan import XrayPlan
from drivers.xray.verdict import look
from node.contract.driver import Host


class Xray:
    """Satisfies `node.contract.driver.Driver`."""

    settings = SETTINGS
    name = "xray"

    def __init__(self, host: Host) -> None:
        self._host = host
        self._installation = installation(host)
        self._sharing = Sharing(host.reactor)

    def fingerprint(self, config_text: str) -> str:
        return json_text.fingerprint(config_text)

    async def version(self) -> str:
        return (await self._installation.current()).version

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> XrayPlan:
        xray, text = await self._installation.current(), config_text
        done = await look(xray, "convert", "pb", "-outpbfile", "/dev/fd/3", "stdin:", stdin=text.encode())
        made = await starting.read(self._host.reactor, text, config.plan, done.output, text, exclude, xray.number)
        return XrayPlan(self._host, self._installation, self._sharing, made)

    def sweep(self) -> list[int]:
        orphans = sweep(self._host.directory)
        for socket in self._host.directory.glob("*.sock*"):
            socket.unlink()
        return orphans
