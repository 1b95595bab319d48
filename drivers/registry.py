"""The cores that the node can run, by BackendType, and their settings. A new core adds its entry.

A driver is imported at its first use: most nodes only ever run one kind of core.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from drivers.install import releases
from drivers.install.releases import Core
from drivers.process.closed import SETTINGS as CLOSED
from drivers.process.orphans import mark, sweep
from drivers.process.settings import SETTINGS as COMMON
from drivers.process.settings import settings_of
from drivers.process.spawn import Spawner
from drivers.xray.settings import SETTINGS as OF_XRAY
from node.base.settings import Setting
from node.contract.driver import Done, Driver, Host
from protos.service_pb2 import SING_BOX, XRAY


def _xray(host: Host) -> Driver:
    from drivers.xray.driver import Xray

    return Xray(host)


def _sing_box(host: Host) -> Driver:
    from drivers.sing_box.driver import SingBox

    return SingBox(host)


@dataclass(frozen=True)
class Kind:
    """A kind of core: its newest release, a loader of the driver, which has the same name, and settings of its own."""

    core: Core
    load: Callable[[Host], Driver]
    own: Sequence[Setting] = ()

    @property
    def settings(self) -> Sequence[Setting]:
        """All its settings: its driver gets their values in `Host.settings`."""
        return *settings_of(self.core), *self.own


REGISTRY: Mapping[int, Kind] = {
    XRAY: Kind(releases.XRAY, _xray, OF_XRAY),
    SING_BOX: Kind(releases.SING_BOX, _sing_box),
}
# The core that reads geoip.dat and geosite.dat, and the setting of their directory.
READS_LISTS, LISTS_SETTING = XRAY, "XRAY_ASSETS_PATH"
DRIVER_SETTINGS = (*COMMON, *CLOSED, *(setting for kind in REGISTRY.values() for setting in kind.settings))


def set_for(what: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return the values of one setting of each core, `EXECUTABLE_PATH` or `DOWNLOAD_URL`, by the core's name."""
    return {kind.core.name: values.get(kind.core.variable(what), "") for kind in REGISTRY.values()}


def newest_releases() -> dict[str, str]:
    """Return the newest known version of each core, by its name."""
    return {kind.core.name: releases.newest(kind.core.name) for kind in REGISTRY.values()}


def pretended(quiet: bool) -> tuple[Mapping[int, Kind], Callable[[str], None]]:
    """Return the same kinds with pretended cores, and a function that carries out an order to them (`Script.order`).

    Only `nodectl sandbox` uses them. `quiet`: users are connected and have traffic only by order.
    """
    from drivers.pretended.sandbox import Script

    script = Script(quiet)
    kinds = {number: replace(kind, load=partial(script.driver, kind.core.name)) for number, kind in REGISTRY.items()}
    return kinds, script.order


class Drivers(Mapping[int, Driver]):
    """The drivers on a host, each made at its first use."""

    def __init__(self, host: Host, kinds: Mapping[int, Kind] = REGISTRY) -> None:
        self._host = host
        self._kinds = kinds
        self._made: dict[int, Driver] = {}

    def __getitem__(self, kind: int) -> Driver:
        if kind not in self._made:
            self._made[kind] = self._kinds[kind].load(self._host)
        return self._made[kind]

    def __iter__(self) -> Iterator[int]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    async def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        seconds: float,
        output: int = 3,
        heard: Callable[[list[str]], None] = lambda _: None,
    ) -> Done:
        """Run a program that is not a core to its end; it ends with the node at the latest. See `Spawner.run`."""
        spawner = Spawner(self._host.reactor, self._host.directory, environment)
        return await spawner.run(command, seconds=seconds, output=output, heard=heard)

    @property
    def mark(self) -> str:
        """The mark in the environment of this node's cores. Raises `OSError`."""
        return mark(self._host.directory)

    def refused(self) -> list[str]:
        """Try what cores need of the kernel; pretended ones need nothing. Returns a line for each refusal. Blocks."""
        from drivers.process.mechanisms import refused

        return refused() if self._kinds is REGISTRY else []

    def sweep(self, spared: Collection[int] = ()) -> list[int]:
        """Kill the cores of any kind that an earlier node left behind, but the `spared` ones. Blocking, brief.

        Returns their process numbers.
        """
        return sweep(self._host.directory, spared)
