"""What a node takes of the machine over time, look by look, and whether it grows."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

# Seconds between two looks.
LOOK = 5.0
# Of a run of an hour: minutes until it is warm, and those at the begin and the end of the rest that are compared.
HOUR, WARM, WINDOW = 60, 10, 5
# By which the node's memory may have grown, and how many descriptors and threads more there may be: a connection or a
# thread more at the moment of a look is no growth.
GROWTH = 0.02
MORE = 2
_MIB = 2**20


class Sample(NamedTuple):
    """One look. Memory and the state's files in MiB."""

    seconds: float
    memory: float
    core_memory: float
    cores: int
    descriptors: int
    threads: int
    state: float


class Change(NamedTuple):
    """A figure once the node was warm, and at the end: medians."""

    early: float
    late: float

    @property
    def share(self) -> float:
        return self.late / self.early - 1 if self.early else 0.0


@contextmanager
def sampling(pid: int, state: Path) -> Iterator[list[Sample]]:
    """Inside, the list gets a look at the node every few seconds."""
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
    """MiB; 0 if it has gone."""
    with suppress(psutil.NoSuchProcess):
        return float(process.memory_info().rss) / _MIB
    return 0.0


def size(directory: Path) -> float:
    """MiB of the files in it. They come and go meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total / _MIB


def changes(samples: Sequence[Sample], minutes: float) -> dict[str, Change]:
    """Of each figure, by its name. A shorter run is looked at in shorter parts."""
    scale = min(1.0, minutes / HOUR) * 60
    warm, window = WARM * scale, WINDOW * scale
    early = [sample for sample in samples if warm <= sample.seconds < warm + window]
    late = [sample for sample in samples if sample.seconds >= samples[-1].seconds - window]
    assert early, "the run is too short: there is no look at it once it is warm"
    return {name: Change(_median(early, name), _median(late, name)) for name in Sample._fields[1:]}


def _median(samples: Sequence[Sample], name: str) -> float:
    read: Callable[[Sample], float] = lambda sample: getattr(sample, name)  # noqa: E731
    return statistics.median(map(read, samples))


def faults(found: dict[str, Change]) -> list[str]:
    """What grew, in words."""
    memory = found["memory"].share
    grown = [f"the node's memory grew by {memory:.1%}"] if memory > GROWTH else []
    for name in ("descriptors", "threads"):
        change = found[name]
        grown += [f"{name}: {change.early:g} became {change.late:g}"] if change.late > change.early + MORE else []
    return grown
