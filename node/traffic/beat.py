"""How often the counters are read: as often as that costs no more than a small share of a processor."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from statistics import median_low
from typing import NamedTuple

from twisted.internet.interfaces import IReactorTime

from node.base import proc

# The part of one processor that readings may take, with the core's work and the disk's.
SHARE = 0.01
# Seconds between two readings, however cheap they are.
SHORTEST = 1.0
# The last readings whose costs count: one alone may be wrong.
LAST = 3


class Spent(NamedTuple):
    """The processor seconds of a process up to a time."""

    at: float
    cpu: float


# By process. None is a process that is not known.
Looks = Mapping[int | None, Spent]


def interval(costs: Collection[float], longest: float) -> float:
    """Seconds between two readings if the last ones cost so many processor seconds; up to `longest`."""
    return min(longest, max(SHORTEST, median_low(costs) / SHARE if costs else 0.0))


def cost(rest: Looks, begun: Looks, ended: Looks) -> float:
    """Processor seconds of a reading, without other work of these processes, which they go on with as since `rest`."""
    return sum(_extra(rest.get(pid), begun[pid], spent) for pid, spent in ended.items() if pid in begun)


def _extra(rest: Spent | None, begun: Spent, ended: Spent) -> float:
    rate = (begun.cpu - rest.cpu) / (begun.at - rest.at) if rest is not None and begun.at > rest.at else 0.0
    return max(0.0, ended.cpu - begun.cpu - rate * (ended.at - begun.at))


class Begun(NamedTuple):
    """The looks at the beginning of a reading, and those after the one before it."""

    rest: Looks
    begun: Looks


class Beat:
    """`seconds` are those between two readings now, up to `longest`. Cores are known by their PIDs."""

    def __init__(self, clock: IReactorTime, longest: float) -> None:
        self._clock = clock
        self.longest = longest
        self.seconds = interval((), longest)
        self._costs: deque[float] = deque(maxlen=LAST)
        # After the last reading: of the cores, and of this process when the disk had its bytes.
        self._rest: Looks = {}
        self._moved = True

    def begin(self, cores: Iterable[int | None]) -> Begun:
        """Call it before a reading whose cost counts: `read` and `end` follow."""
        return Begun(self._rest, self._look([os.getpid(), *cores]))

    def read(self, cores: Iterable[int | None], moved: bool) -> None:
        """Note that all counters of these cores were read, and whether any had moved."""
        self._moved = moved
        own: Looks = {pid: spent for pid, spent in self._rest.items() if pid == os.getpid()}
        self._rest = {**own, **self._look(cores)}

    def end(self, begun: Begun) -> None:
        """Note the cost of a reading, when its bytes are on disk."""
        self._rest = {**self._rest, **self._look([os.getpid()])}
        self._costs.append(cost(*begun, self._rest))
        self.seconds = interval(self._costs, self.longest)

    def is_idle(self, cores: Collection[int | None]) -> bool:
        """Whether none of these cores has used a processor since the last reading, at which no counter had moved.

        What a core counted during that reading is not noticed: bytes of some milliseconds, after a second without any.
        """
        now = self._look(cores)
        return not self._moved and all(
            pid in now and pid in self._rest and now[pid].cpu == self._rest[pid].cpu for pid in cores
        )

    def _look(self, pids: Iterable[int | None]) -> Looks:
        now = self._clock.seconds()
        return {pid: Spent(now, cpu) for pid in pids if (cpu := proc.cpu(pid)) is not None}
