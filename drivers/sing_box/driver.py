"""The sing-box driver: has the core parse a configuration, and makes a plan of the result."""

from __future__ import annotations

from drivers.process import readiness as starting
from drivers.process.allowlist import Allowed
from drivers.process.planned import Core
from drivers.sing_box import config, files
from drivers.sing_box.executable import counts, installation
from drivers.sing_box.plan import SingBoxPlan
from drivers.sing_box.verdict import look
from node.contract.driver import Host


class SingBox(Core):
    """Satisfies `node.contract.driver.Driver`."""

    name = "sing-box"

    def __init__(self, host: Host) -> None:
        super().__init__(host, installation(host))

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> SingBoxPlan:
        chosen, directory = self._installation.chosen, self._host.directory
        core, text = await self._installation.current(chosen), config_text.encode()
        output = await self._installation.answered(
            core, "format", text, lambda: look(core, "format", stdin=text, output=1)
        )
        reading = config.plan, output, exclude, directory, counts(core), Allowed.of(self._host)
        made = await starting.read(self._host.reactor, config_text, *reading)
        naming = files.asked, made.tree, self._installation.paths, core.unconfined
        touched = await starting.read(self._host.reactor, config_text, *naming)
        return SingBoxPlan(self._host, self._installation, self._sharing, made, touched, chosen)
