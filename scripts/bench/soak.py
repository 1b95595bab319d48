"""An hour of everything that a node is asked to do, and whether it grows: memory, descriptors, threads, files.

`python -m scripts.bench.soak [--minutes 60] [--core xray] [--users 2000] [--memory MIB] [--picture PATH]
[--samples PATH] [--log PATH]`. The mix is that of `scripts.bench.mixed`, steady in kind and rate, with the usual
settings of a node. At the end there is a table, and the verdict: the median of the node's memory in the last five
minutes against that of minutes 10 to 15, and the same of its descriptors and threads; a shorter run is looked at in
shorter parts. The status is 1 if anything grew, anything failed that should not, or a traceback stands in the node's
log. `--picture` takes an SVG of the memory, `--samples` the looks, each a line of JSON, `--log` what the node said.
With `--memory` node and cores have no more than that together, as root alone can arrange, and what they took is said.
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
    """A core, as its node is asked. `calm`: every new user is another core, which nobody asks for every few seconds."""

    request: Request
    calm: int


CORES = {"xray": Core(on_xray, 1), "sing-box": Core(on_sing_box, 20)}
# What stands in the node's log when something went wrong that it did not expect.
_BAD = ("Traceback", "Unhandled", "#critical")


class Run(NamedTuple):
    """What came of it; processor times are shares of one processor, of the node, its cores, and the load itself."""

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
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.soak")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--core", choices=CORES, default="xray")
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--memory", type=int, metavar="MIB")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--log", type=Path)
    return parser.parse_args()


def soak(on: Stage, core: Core, users: int, seconds: float) -> Run:
    crowd = Crowd(users, [TAG], steady=STEADY)
    with loading() as load, Mixed(on, load, core.request, free_port(), crowd, core.calm) as mixed:
        with sampling(on.node.pid, on.node.state) as samples:
            before = used(on)
            mixed.run(seconds)
            after = used(on)
        load.close()
    node, cores, ours = ((late - early) / seconds for early, late in zip(before, after, strict=True))
    return Run(samples, mixed.tallies, (node, cores, ours), list(on.node.lines))


def within(group: Confined, size: int) -> list[str]:
    """Say what node and cores took together; who was ended for want of memory."""
    print(f"\nof {size} MiB node and cores took {group.peak() / 2**20:.0f} at most, with the kernel's part and files")
    return [f"{kills} processes were ended for want of memory"] if (kills := group.kills()) else []


def used(on: Stage) -> tuple[float, float, float]:
    """Seconds of processor time."""
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
    print(f"\nof one processor: node {node:.0%}, cores {cores:.0%}, controllers {ours:.0%}")
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
