"""The Xray driver: a configuration is converted by the core itself and taken over."""

from __future__ import annotations

from drivers.process import readiness as starting
from drivers.process.known import Allowed
from drivers.process.planned import Core
from drivers.xray import config
from drivers.xray.executable import installation
from drivers.xray.plan import XrayPlan
from drivers.xray.verdict import look
from node.contract.driver import Host


class Xray(Core):
    """Satisfies `node.contract.driver.Driver`."""

    name = "xray"

    def __init__(self, host: Host) -> None:
        super().__init__(host, installation(host))

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> XrayPlan:
        xray, text = await self._installation.current(), config_text
        done = await look(xray, "convert", "pb", "-outpbfile", "/dev/fd/3", "stdin:", stdin=text.encode())
        reading = config.plan, done.output, text, exclude, xray.number, Allowed.of(self._host)
        made = await starting.read(self._host.reactor, text, *reading)
        return XrayPlan(self._host, self._installation, self._sharing, made)
