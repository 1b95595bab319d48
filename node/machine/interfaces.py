"""What the machine's network interfaces have carried, as the kernel counts it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

# A start of the machine has one of its own, in containers too.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# There is one for an interface that is a piece of hardware, to the machine: also in a virtual one.
_DEVICE = "/sys/class/net/{}/device"
LOOPBACK = "lo"


class Carried(NamedTuple):
    """Bytes in and out."""

    received: int
    sent: int


class Interfaces(NamedTuple):
    """All of them, by name, since this start of the machine; `devices` are those that are hardware."""

    boot: str
    carried: Mapping[str, Carried]
    devices: frozenset[str]


def read_interfaces() -> Interfaces:
    """Ask the kernel: some tenths of a millisecond. Raises `OSError`."""
    counted = psutil.net_io_counters(pernic=True, nowrap=False)
    carried = {name: Carried(one.bytes_recv, one.bytes_sent) for name, one in counted.items()}
    devices = frozenset(name for name in carried if Path(_DEVICE.format(name)).exists())
    return Interfaces(_BOOT.read_text().strip(), carried, devices)


def of_machine(interfaces: Interfaces) -> frozenset[str]:
    """Those by which it is connected: what crosses a bridge or a tunnel crosses hardware, too, and counts once."""
    return interfaces.devices or frozenset(interfaces.carried) - {LOOPBACK}
