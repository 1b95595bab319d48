"""Checks of the machine. Pure: they take values, None where one is unknown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from node.doctor.findings import Check, Finding, by

MEBIBYTE = 1024**2
# The values that a node needs.
OPEN_FILES = 65_536
BACKLOG = 4096
BUFFER = 4 * MEBIBYTE
FREE, SCARCE = 100 * MEBIBYTE, 10 * MEBIBYTE
MEMORY, SHORT = 128 * MEBIBYTE, 48 * MEBIBYTE
# The part of the connection tracking table above which to warn.
FULL = 0.8
_GOOD = ("bbr", "bbr2", "bbr3", "cubic")


@dataclass(frozen=True)
class Machine:
    """Values from the kernel; sizes are in bytes, None is unknown."""

    synchronised: bool | None = None
    open_files: int | None = None
    conntrack: tuple[int, int] | None = None
    somaxconn: int | None = None
    tcp_rmem: Sequence[int] | None = None
    tcp_wmem: Sequence[int] | None = None
    congestion: str | None = None
    disk_free: int | None = None
    disk_fault: str = ""
    memory_free: int | None = None
    optimised: bool | None = None


def check(machine: Machine) -> Iterator[Finding]:
    """Make all checks whose value is known."""
    if machine.synchronised is not None:
        found = "synchronised" if machine.synchronised else "the clock is not synchronised"
        yield by(Check.CLOCK, found, warning=not machine.synchronised)
    yield from _limits(machine)
    yield from _network(machine)
    yield from _room(machine)
    if (optimised := machine.optimised) is not None:
        yield by(Check.PYTHON, f"a {'fast' if optimised else 'plain'} build", warning=not optimised)


def _limits(machine: Machine) -> Iterator[Finding]:
    if (files := machine.open_files) is not None:
        yield by(Check.FILES, f"{files:,} open files allowed", failing=files < 1024, warning=files < OPEN_FILES)
    if machine.conntrack is not None:
        count, most = machine.conntrack
        found = f"{count:,} of {most:,} entries are used"
        yield by(Check.CONNTRACK, found, failing=count >= most, warning=count >= FULL * most)


def _network(machine: Machine) -> Iterator[Finding]:
    if (backlog := machine.somaxconn) is not None:
        yield by(Check.BACKLOG, str(backlog), warning=backlog < BACKLOG)
    if machine.tcp_rmem and machine.tcp_wmem:
        received, sent = machine.tcp_rmem[-1], machine.tcp_wmem[-1]
        found = f"up to {received:,} bytes to receive, {sent:,} to send"
        yield by(Check.BUFFERS, found, warning=min(received, sent) < BUFFER)
    if (name := machine.congestion) is not None:
        yield by(Check.CONGESTION, name, warning=name not in _GOOD)


def _room(machine: Machine) -> Iterator[Finding]:
    if machine.disk_fault:
        yield by(Check.DISK, machine.disk_fault, failing=True, warning=True)
    elif (free := machine.disk_free) is not None:
        yield by(Check.DISK, f"{free // MEBIBYTE:,} MiB are free", failing=free < SCARCE, warning=free < FREE)
    if (free := machine.memory_free) is not None:
        yield by(Check.MEMORY, f"{free // MEBIBYTE:,} MiB are free", failing=free < SHORT, warning=free < MEMORY)
