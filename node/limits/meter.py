"""What interfaces have carried since they were read before, from the kernel's counters. Pure.

The kernel counts each interface since it came, and nothing across a start of the machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from node.machine.interfaces import Carried


@dataclass
class Meter:
    """Knows what was read last, and since which start of the machine (`boot`); empty: nothing was ever read."""

    boot: str = ""
    last: Mapping[str, Carried] = field(default_factory=dict)

    def read(self, boot: str, interfaces: Mapping[str, Carried], counted: Collection[str]) -> Carried:
        """What those that count have carried since; what was before the first reading is nobody's.

        An interface that was not there, and all of them on another start of the machine, are counted from zero; so is a
        counter that went down.
        """
        before = self.last if boot == self.boot else {}
        new = [_moved(before.get(name), now) for name, now in interfaces.items() if name in counted]
        first = not self.boot
        self.boot, self.last = boot, interfaces
        if first:
            return Carried(0, 0)
        return Carried(sum(moved.received for moved in new), sum(moved.sent for moved in new))


def _moved(before: Carried | None, now: Carried) -> Carried:
    """Each way by itself: 32-bit counters of old drivers overflow one at a time."""
    if before is None:
        return now
    return Carried(*(new - old if new >= old else new for old, new in zip(before, now, strict=True)))
