"""Bytes that network interfaces carried between two readings of the kernel's counters. Pure.

The kernel counts from when an interface appeared, and starts at zero when the machine starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from node.machine.interfaces import Carried


@dataclass
class Meter:
    """The last reading, and the boot id of the machine at that time; empty before the first reading."""

    boot: str = ""
    last: Mapping[str, Carried] = field(default_factory=dict)

    def read(self, boot: str, interfaces: Mapping[str, Carried], counted: Collection[str]) -> Carried:
        """Return the bytes that the `counted` interfaces carried since the last reading; zero for the first reading.

        A new interface counts from zero, as do all interfaces after a start of the machine, and a counter that went
        down.
        """
        before = self.last if boot == self.boot else {}
        new = [_moved(before.get(name), now) for name, now in interfaces.items() if name in counted]
        first = not self.boot
        self.boot, self.last = boot, interfaces
        if first:
            return Carried(0, 0)
        return Carried(sum(moved.received for moved in new), sum(moved.sent for moved in new))


def _moved(before: Carried | None, now: Carried) -> Carried:
    """The difference of each direction: the 32-bit counters of old drivers overflow one at a time."""
    if before is None:
        return now
    return Carried(*(new - old if new >= old else new for old, new in zip(before, now, strict=True)))
