"""Traffic counters of the machine's network interfaces, from the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from node.base import proc

# Exists for interfaces that are hardware to the machine, also to a virtual machine.
_DEVICE = "/sys/class/net/{}/device"
LOOPBACK = "lo"


class Carried(NamedTuple):
    """Bytes received and sent."""

    received: int
    sent: int


class Interfaces(NamedTuple):
    """Counters of all interfaces by name, since the start `boot` of the machine; `devices` are hardware interfaces."""

    boot: str
    carried: Mapping[str, Carried]
    devices: frozenset[str]


def read_carried() -> dict[str, Carried]:
    """Read the counters of all interfaces. Raises `OSError`."""
    counted = psutil.net_io_counters(pernic=True, nowrap=False)
    return {name: Carried(one.bytes_recv, one.bytes_sent) for name, one in counted.items()}


def read_interfaces() -> Interfaces:
    """Read the kernel's counters; takes some tenths of a millisecond. Raises `OSError`."""
    carried = read_carried()
    devices = frozenset(name for name in carried if Path(_DEVICE.format(name)).exists())
    return Interfaces(proc.boot(), carried, devices)


def of_machine(interfaces: Interfaces) -> frozenset[str]:
    """The interfaces that connect the machine: hardware or, in containers without any, all but loopback.

    Traffic of a bridge or a tunnel crosses hardware, too, and would count twice.
    """
    return interfaces.devices or frozenset(interfaces.carried) - {LOOPBACK}
