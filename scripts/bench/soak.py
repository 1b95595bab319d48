"""Soak test: an hour of mixed work, and a check that the node does not grow: memory, descriptors, threads, files.

`python -m scripts.bench.soak [--minutes 60] [--core xray] [--users 2000] [--memory MIB] [--picture PATH]
[--samples PATH] [--log PATH]`. The mix is that of `scripts.bench.mixed`, steady in kind and rate, with the usual
settings of a node. At the end it prints a table and compares the median of the node's memory in the last five minutes
with that of minutes 10 to 15, likewise its descriptors and threads; the windows of a shorter run are shorter. The exit
status is 1 if anything grew or failed, or the node logged a traceback. `--picture` writes an SVG of the memory,
`--samples` the samples as lines of JSON, `--log` the node's output. `--memory` (needs root) limits node and cores
together, and prints their peak.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from scripts.bench.confined import Confined, confined
from scripts.bench.curve import picture
from scripts.bench.load import loading
from scripts.bench.mixed import STEADY, Mixed, Request, Tally
from scripts.bench.overlap import TAG, on_sing_box, on_xray, spent
from scripts.bench.samples import Change, Sample, changes, faults, sampling
from scripts.bench.stage import Crowd, Stage, machine, stage
from scripts.staging.ports import free_port


class Core(NamedTuple):
    """A core's requests. `calm` stretches single-user syncs: on sing-box every new user takes another core."""

    request: Request
    calm: int


CORES = {"xray": Core(on_xray, 1), "sing-box": Core(on_sing_box, 20)}
# Marks of an unexpected error in the node's log.
_BAD = ("Traceback", "Unhandled", "#critical")


class Run(NamedTuple):
    """Results of a run; `processor` are shares of one processor, of the node, its cores, and the load generator."""

    samples: Sequence[Sample]
    tallies: Mapping[str, Tally]
    processor: tuple[float, float, float]
    lines: Sequence[str]


def main() -> int:
    options = arguments()
    print(machine(), flush=True)
    core = CORES[options.core]
    with confined(options.memory * 2**20) if options.memory else nullcontext() as group:
        with stage(TRAFFIC_INTERVAL="", through=group.through if group else ()) as on:
            run = soak(on, core, options.users, options.minutes * 60)
        killed = within(group, options.memory) if group else []
    found = changes(run.samples, options.minutes)
    table(run, found)
    wrong = faults(found) + failures(run) + killed
    print("\n".join(wrong) or "nothing grew, nothing failed")
    keep(options, run)
    return 1 if wrong else 0


def arguments() -> argparse.Namespace:
    summary = "Run mixed work on a node and check that it does not grow. Exit status 1 if it grew or anything failed."
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.soak", description=summary)
    parser.add_argument("--minutes", type=float, default=60, help="default: 60")
    parser.add_argument("--core", choices=CORES, default="xray", help="default: xray")
    parser.add_argument("--users", type=int, default=2000, help="default: 2000")
    parser.add_argument("--memory", type=int, metavar="MIB", help="limit node and cores together (needs root)")
    parser.add_argument("--picture", type=Path, help="write a chart of the memory as SVG")
    parser.add_argument("--samples", type=Path, help="write the samples as lines of JSON")
    parser.add_argument("--log", type=Path, help="write the node's output")
    return parser.parse_args()


def soak(on: Stage, core: Core, users: int, seconds: float) -> Run:
    crowd = Crowd(users, [TAG], steady=STEADY)
    with loading() as load, Mixed(on, load, core.request, free_port(), crowd, core.calm) as mixed:
        with sampling(on.node.node_pid, on.node.state) as samples:
            before = used(on)
            mixed.run(seconds)
            after = used(on)
        load.close()
    node, cores, ours = ((late - early) / seconds for early, late in zip(before, after, strict=True))
    return Run(samples, mixed.tallies, (node, cores, ours), list(on.node.lines))


def within(group: Confined, size: int) -> list[str]:
    """Print the peak memory of node and cores together. Returns a line of text if the OOM killer ended processes."""
    peak = group.peak() / 2**20
    print(f"\npeak memory of node and cores: {peak:.0f} of {size} MiB, kernel memory and page cache included")
    return [f"the OOM killer ended {kills} processes"] if (kills := group.kills()) else []


def used(on: Stage) -> tuple[float, float, float]:
    """Processor seconds of the node, its cores, and this process."""
    return *spent(on), time.process_time()


def table(run: Run, found: Mapping[str, Change]) -> None:
    print(f"\n{'':28} {'times':>7} {'mean ms':>9} {'worst ms':>9} {'failed':>7}")
    for name, tally in run.tallies.items():
        mean = 1000 * tally.total / tally.times
        print(f"{name:28} {tally.times:>7} {mean:>9.1f} {1000 * tally.worst:>9.0f} {len(tally.failures):>7}")
    print(f"\n{'medians':28} {'early':>9} {'late':>9} {'change':>9}")
    for name, change in found.items():
        print(f"{name:28} {change.early:>9.2f} {change.late:>9.2f} {change.share:>+9.1%}")
    node, cores, ours = run.processor
    print(f"\nshare of one processor: node {node:.0%}, cores {cores:.0%}, controllers {ours:.0%}")
    print(f"load {', '.join(f'{figure:.1f}' for figure in os.getloadavg())}")


def failures(run: Run) -> list[str]:
    failed = [f"{name}: {text}" for name, tally in run.tallies.items() for text in tally.failures]
    return failed + [f"in the log: {line}" for line in run.lines if any(word in line for word in _BAD)]


def keep(options: argparse.Namespace, run: Run) -> None:
    samples = run.samples
    if options.log:
        options.log.write_text("".join(f"{line}\n" for line in run.lines))
    if options.samples:
        options.samples.write_text("".join(json.dumps(sample._asdict()) + "\n" for sample in samples))
    if options.picture:
        minutes = [sample.seconds / 60 for sample in samples]
        node = list(zip(minutes, (sample.memory for sample in samples), strict=True))
        cores = list(zip(minutes, (sample.core_memory for sample in samples), strict=True))
        options.picture.write_text(picture("Memory under mixed load", "MiB", {"node": node, "cores": cores}))


if __name__ == "__main__":
    raise SystemExit(main())
