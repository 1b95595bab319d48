"""A storm of changed configurations under traffic: connections lost, and the duration of each Start.

`python -m scripts.bench.storm [--quick]` prints a row for each core: 60 Starts (`--quick`: 12), each with another
configuration, are sent three a second without waiting for replies. Each has 10,000 users; 200 connections are live
through the first core, and four clients connect without a pause. `made` and `failed` count new connections, `dropped`
live ones that ended. `median` and `max` are seconds from sending a Start to its reply, `refused` the Starts that
returned an error, whose texts follow the row. `cores` is the most cores at once; `cores MiB` the peak of their memory
(proportional set size), `node MiB` the peak of the node's (RSS).
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import psutil

from node.base.errors import NodeError
from protos.service_pb2 import Backend
from scripts.bench.overlap import TAG, on_sing_box, on_xray, proportional
from scripts.bench.plain import PlainActivity
from scripts.bench.stage import LIVE, Crowd, Stage, machine, stage
from scripts.staging.controller import ControllerError
from scripts.staging.ports import free_port

STARTS, QUICK = 60, 12
# Starts a second, users, and clients that connect without a pause.
RATE, USERS, CLIENTS = 3.0, 10_000, 4
# Seconds of traffic before the first Start and after the last reply, and between two samples of memory and processes.
AROUND, LOOK = 2.0, 0.1


@dataclass
class Answers:
    """Replies to the Starts: seconds until each, and the error texts of refused ones."""

    took: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass
class Most:
    """Peaks: cores at once, MiB of all cores, MiB of the node."""

    cores: int = 0
    cores_mib: float = 0.0
    node_mib: float = 0.0


def main(starts: int) -> None:
    print(machine())
    print(f"{starts} Starts, {RATE:g} a second; {USERS:,} users, {LIVE} live connections, {CLIENTS} clients")
    columns = ("made", "failed", "dropped", "median s", "max s", "refused", "cores", "cores MiB", "node MiB")
    print(f"{'':>10} " + " ".join(f"{column:>9}" for column in columns))
    for name, request in {"Xray": on_xray, "sing-box": on_sing_box}.items():
        with stage() as on:
            storm(name, on, request, starts)
    print(machine())


def storm(name: str, on: Stage, request: Callable[[int, Crowd, int], Backend], starts: int) -> None:
    crowd, port = Crowd(USERS, [TAG]), free_port()
    backends = [request(port, crowd, number) for number in range(starts + 1)]
    on.controller.start(backends[0])
    with ExitStack() as stack:
        share = LIVE // CLIENTS
        identity = crowd.live.uuid
        workers = [stack.enter_context(PlainActivity(port, identity, on.echo, share, pause=0)) for _ in range(CLIENTS)]
        most = stack.enter_context(watching(on))
        time.sleep(AROUND)
        answers = sent(on, backends[1:])
        time.sleep(AROUND)
        for worker in workers:
            worker.rest()
    row(name, workers, answers, most)


def sent(on: Stage, backends: list[Backend]) -> Answers:
    """Send each Start when it is due; return after all replies."""
    answers, begun = Answers(), time.monotonic()

    def start(number: int) -> None:
        time.sleep(max(0.0, begun + number / RATE - time.monotonic()))
        at = time.monotonic()
        try:
            on.controller.start(backends[number])
        except (ControllerError, NodeError) as error:
            answers.refused.append(str(error))
        answers.took.append(time.monotonic() - at)

    with ThreadPoolExecutor(len(backends)) as pool:
        list(pool.map(start, range(len(backends))))
    return answers


@contextmanager
def watching(on: Stage) -> Iterator[Most]:
    most, over = Most(), threading.Event()

    def look() -> None:
        while not over.wait(LOOK):
            cores = [child for child in psutil.Process(on.node.pid).children(recursive=True) if is_core(child)]
            most.cores = max(most.cores, len(cores))
            most.cores_mib = max(most.cores_mib, sum(map(proportional, cores)))
            most.node_mib = max(most.node_mib, on.rss())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def is_core(process: psutil.Process) -> bool:
    """Whether the process runs a core (`run`), not just a check of a configuration or a version query."""
    with suppress(psutil.Error):
        return "run" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    return False


def row(name: str, workers: list[PlainActivity], answers: Answers, most: Most) -> None:
    made = sum(len(worker.opened) for worker in workers)
    failed = sum(len(worker.failed) for worker in workers)
    dropped = sum(len(worker.dropped) for worker in workers)
    took = f"{statistics.median(answers.took):>9.2f} {max(answers.took):>9.2f} {len(answers.refused):>9}"
    memory = f"{most.cores:>9} {most.cores_mib:>9.0f} {most.node_mib:>9.0f}"
    print(f"{name:>10} {made:>9,} {failed:>9} {dropped:>9} {took} {memory}", flush=True)
    for text in sorted(set(answers.refused)):
        print(f"{'':>12}{answers.refused.count(text)} x {text[:150]}")
    for trouble in [trouble for worker in workers for trouble in [*worker.dropped, *worker.failed]][:3]:
        print(f"{'':>12}{trouble[:150]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} Starts")
    main(QUICK if parser.parse_args().quick else STARTS)
