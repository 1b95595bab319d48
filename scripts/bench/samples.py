"""Sample a node's memory, descriptors, threads and files over time, and detect growth."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

# Seconds between two samples.
LOOK = 5.0
# Minutes: a full run, its warm-up, and the windows after the warm-up and at the end that are compared.
HOUR, WARM, WINDOW = 60, 10, 5
# The share by which the node's memory may grow, and the number of additional descriptors and threads: a connection or a
# thread more at the time of a sample is no growth.
GROWTH = 0.02
MORE = 2
_MIB = 2**20


class Sample(NamedTuple):
    """One sample. Memory and the state's files are in MiB."""

    seconds: float
    memory: float
    core_memory: float
    cores: int
    descriptors: int
    threads: int
    state: float


class Change(NamedTuple):
    """The medians of a figure after the warm-up and at the end."""

    early: float
    late: float

    @property
    def share(self) -> float:
        return self.late / self.early - 1 if self.early else 0.0


@contextmanager
def sampling(pid: int, state: Path) -> Iterator[list[Sample]]:
    """Inside, append a sample of the node to the list every few seconds."""
    samples, over, begun = list[Sample](), threading.Event(), time.monotonic()

    def work() -> None:
        while not over.wait(LOOK):
            samples.append(look(pid, state, time.monotonic() - begun))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def look(pid: int, state: Path, seconds: float) -> Sample:
    node = psutil.Process(pid)
    memories = [memory for child in node.children(recursive=True) if (memory := resident(child))]
    with node.oneshot():
        taken = resident(node), sum(memories), len(memories), node.num_fds(), node.num_threads()
    return Sample(seconds, *taken, size(state))


def resident(process: psutil.Process) -> float:
    """Resident memory in MiB; 0 if the process has ended."""
    with suppress(psutil.NoSuchProcess):
        return float(process.memory_info().rss) / _MIB
    return 0.0


def size(directory: Path) -> float:
    """MiB of the files in a directory, some of which may disappear meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total / _MIB


def changes(samples: Sequence[Sample], minutes: float) -> dict[str, Change]:
    """The change of each figure, by its name. Warm-up and windows of a run under an hour are shorter in proportion."""
    scale = min(1.0, minutes / HOUR) * 60
    warm, window = WARM * scale, WINDOW * scale
    early = [sample for sample in samples if warm <= sample.seconds < warm + window]
    late = [sample for sample in samples if sample.seconds >= samples[-1].seconds - window]
    assert early, "the run is too short: there is no sample after the warm-up"
    return {name: Change(_median(early, name), _median(late, name)) for name in Sample._fields[1:]}


def _median(samples: Sequence[Sample], name: str) -> float:
    read: Callable[[Sample], float] = lambda sample: getattr(sample, name)  # noqa: E731
    return statistics.median(map(read, samples))


def faults(found: dict[str, Change]) -> list[str]:
    """A line of text for each figure that grew."""
    memory = found["memory"].share
    grown = [f"the node's memory grew by {memory:.1%}"] if memory > GROWTH else []
    for name in ("descriptors", "threads"):
        change = found[name]
        grown += [f"{name} grew from {change.early:g} to {change.late:g}"] if change.late > change.early + MORE else []
    return grown
