"""Memory, CPU and network usage of the machine, sampled once a second and available without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import psutil
from twisted.internet.interfaces import IReactorTime

from node.base.part import Part
from node.base.periodic import Periodic
from node.machine.interfaces import LOOPBACK, Carried, read_carried
from protos.service_pb2 import SystemStatsResponse


@dataclass(frozen=True)
class Sample:
    """One reading of the machine's counters. `at` is in seconds of a monotonic clock, the CPU times in core seconds."""

    at: float
    cpu_idle: float
    cpu_total: float
    cores: int
    mem_total: int
    mem_available: int
    uptime: int
    interfaces: Mapping[str, Carried]


# Bytes per second that a message can have; more come out of an interval near zero.
MOST = 2**63


def reading(before: Sample, after: Sample) -> SystemStatsResponse:
    """Compute the values from two samples; rates are over the actual time between them.

    They are in bytes, percent of all cores, bytes per second, and seconds.
    """
    elapsed = after.at - before.at
    return SystemStatsResponse(
        mem_total=after.mem_total,
        mem_used=after.mem_total - after.mem_available,
        cpu_cores=after.cores,
        cpu_usage=cpu_usage(before, after),
        incoming_bandwidth_speed=_speed(before, after, lambda counters: counters.received, elapsed),
        outgoing_bandwidth_speed=_speed(before, after, lambda counters: counters.sent, elapsed),
        uptime=after.uptime,
    )


def cpu_usage(before: Sample, after: Sample) -> float:
    """Percent of all cores, 0 to 100; 0 where no time passed. The kernel's idle times may step back a little."""
    total = after.cpu_total - before.cpu_total
    if total <= 0:
        return 0.0
    idle = after.cpu_idle - before.cpu_idle
    return min(100.0, max(0.0, 100.0 * (1.0 - idle / total)))


def _speed(before: Sample, after: Sample, of: Callable[[Carried], int], elapsed: float) -> int:
    """Bytes per second over all interfaces in both samples, at most MOST. One whose counter was reset counts as 0."""
    if elapsed <= 0:
        return 0
    known = after.interfaces.keys() & before.interfaces.keys()
    moved = sum(max(0, of(after.interfaces[name]) - of(before.interfaces[name])) for name in known)
    return round(min(moved / elapsed, MOST))


def read_sample() -> Sample:
    """Read the kernel's counters; takes about a millisecond. Raises OSError."""
    cpu = psutil.cpu_times()
    memory = psutil.virtual_memory()
    # The time of guests is part of user time, as psutil counts it too.
    total = sum(cpu) - cpu.guest - cpu.guest_nice
    return Sample(
        at=time.monotonic(),
        cpu_idle=cpu.idle + cpu.iowait,
        cpu_total=total,
        cores=psutil.cpu_count() or 1,
        mem_total=memory.total,
        mem_available=memory.available,
        uptime=int(time.clock_gettime(time.CLOCK_BOOTTIME)),
        interfaces={name: carried for name, carried in read_carried().items() if name != LOOPBACK},
    )


def since_boot(sample: Sample) -> SystemStatsResponse:
    """The values of a single sample: no speeds, and the CPU usage since the machine started."""
    return reading(replace(sample, cpu_idle=0.0, cpu_total=0.0), sample)


class SystemStats(Part):
    """Takes a sample every `interval` seconds while it runs. `current` works at any time, also before that.

    While the kernel's counters cannot be read the last values stay.
    """

    title = "the machine statistics"

    def __init__(self, clock: IReactorTime, read: Callable[[], Sample] = read_sample, interval: float = 1) -> None:
        self._read = read
        self._reading = since_boot(sample := read())
        self._last = sample
        self._sampling = Periodic("reading the machine's counters", self._sample, interval, clock)

    def start(self) -> None:
        self._sampling.start()

    def stop(self) -> None:
        self._sampling.stop()

    @property
    def warnings(self) -> list[str]:
        """Whether the values are old, because the counters cannot be read."""
        return self._sampling.warnings

    def current(self) -> SystemStatsResponse:
        """The newest values, those of `since_boot` until there is a second sample."""
        return self._reading

    def _sample(self) -> None:
        sample = self._read()
        self._reading = reading(self._last, sample)
        self._last = sample
