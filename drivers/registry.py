"""The cores that the node can run, by BackendType. A new core adds one line."""

from __future__ import annotations

from collections.abc import Callable

from drivers.sing_box.driver import SingBox
from drivers.xray.driver import Xray
from node.contract.driver import Driver, Host
from protos.service_pb2 import SING_BOX, XRAY

REGISTRY: dict[int, Callable[[Host], Driver]] = {
    XRAY: Xray,
    SING_BOX: SingBox,
}
