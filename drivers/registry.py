"""The cores that the node can run, by BackendType, and their settings. A new core adds one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from drivers.sing_box.driver import SingBox
from drivers.xray.driver import Xray
from node.contract.driver import Driver, Host
from node.contract.settings import Setting
from protos.service_pb2 import SING_BOX, XRAY


class Kind(Protocol):
    """The class of a core's driver; of its settings the driver is given the values in `Host.settings`."""

    @property
    def settings(self) -> Sequence[Setting]: ...

    def __call__(self, host: Host) -> Driver: ...


REGISTRY: dict[int, Kind] = {
    XRAY: Xray,
    SING_BOX: SingBox,
}
DRIVER_SETTINGS = tuple(setting for kind in REGISTRY.values() for setting in kind.settings)
