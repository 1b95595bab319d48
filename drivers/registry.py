"""The cores that the node can run, by BackendType. A new core adds one line."""

from __future__ import annotations

from collections.abc import Callable

from drivers.interface import Driver, Host
from drivers.sing_box import SingBox
from drivers.xray import Xray
from protos.service_pb2 import SING_BOX, XRAY

REGISTRY: dict[int, Callable[[Host], Driver]] = {
    XRAY: Xray,
    SING_BOX: SingBox,
}
