"""The cores that the node can run, by BackendType. A new core adds one line."""

from __future__ import annotations

from collections.abc import Callable

from drivers.interface import Driver, Host
from drivers.xray import Xray
from protos.service_pb2 import XRAY

REGISTRY: dict[int, Callable[[Host], Driver]] = {
    XRAY: Xray,
}
