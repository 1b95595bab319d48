"""The Xray driver: prepares a configuration, which the core itself converts, for a run."""

from __future__ import annotations

from dataclasses import replace

from drivers.process import readiness as starting
from drivers.process.allowlist import Allowed
from drivers.process.planned import Core
from drivers.xray import config, files
from drivers.xray.executable import installation
from drivers.xray.plan import XrayPlan
from drivers.xray.verdict import CONVERT, look
from node.contract.driver import Host


class Xray(Core):
    """Satisfies `node.contract.driver.Driver`."""

    name = "xray"

    def __init__(self, host: Host) -> None:
        super().__init__(host, installation(host))

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> XrayPlan:
        chosen, text = self._installation.chosen, config_text
        xray = await self._installation.current(chosen)
        reactor, paths = self._host.reactor, self._installation.paths
        touched = await starting.read(reactor, text, files.asked, text, paths)
        output = await self._installation.answered(
            xray, "convert", text.encode(), lambda: look(xray.touching(touched), *CONVERT, stdin=text.encode())
        )
        reading = config.plan, output, text, exclude, xray.number, Allowed.of(self._host)
        made = await starting.read(reactor, text, *reading)
        await starting.read(reactor, text, files.check, made.base, paths, xray.unconfined)
        touched = replace(touched, ports=made.ports)
        return XrayPlan(self._host, self._installation, self._sharing, made, touched, chosen)
