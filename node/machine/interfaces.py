"""Traffic counters of the machine's network interfaces, from the kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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


def carried_between(before: Interfaces, now: Interfaces, counted: Collection[str]) -> Carried:
    """The bytes that the `counted` interfaces carried between two readings.

    The kernel counts from when an interface appeared, and from zero when the machine starts. So a new interface counts
    from zero, as do all interfaces after a start of the machine, and a counter that went down.
    """
    known = before.carried if now.boot == before.boot else {}
    new = [_moved(known.get(name), carried) for name, carried in now.carried.items() if name in counted]
    return Carried(sum(each.received for each in new), sum(each.sent for each in new))


def _moved(before: Carried | None, now: Carried) -> Carried:
    """The difference of each direction: the 32-bit counters of old drivers overflow one at a time."""
    if before is None:
        return now
    return Carried(*(new - old if new >= old else new for old, new in zip(before, now, strict=True)))


def of_machine(interfaces: Interfaces) -> frozenset[str]:
    """The interfaces that connect the machine: hardware or, in containers without any, all but loopback.

    Traffic of a bridge or a tunnel crosses hardware, too, and would count twice.
    """
    return interfaces.devices or frozenset(interfaces.carried) - {LOOPBACK}
