"""`python -m scripts.attack [KIND ...] [--seconds 60] [--cases N] [--seed N]`: fuzz a node, kind by kind, and scan it.

It starts a node with a running core for each kind, which lasts so many seconds or cases. A kind fails if the node
replies with an internal error, a controller waits longer than a second, the node exceeds its memory bound, keeps
connections, or logs a traceback. The seed determines the cases. The scanner looks once at each port, and fails if a
probe shows which program it is.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from scripts.attack import scanner
from scripts.attack.kinds import KINDS
from scripts.attack.siege import MEMORY, besieged, siege
from scripts.staging.node import NodeProcess

# The longest that a controller may wait, in seconds.
PATIENCE = 1.0
SCANNER = "scanner"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.attack", description="Fuzz a node, kind by kind.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join((*KINDS, SCANNER))} (default: all)")
    parser.add_argument("--seconds", type=float, default=60, help="for each kind (default: 60)")
    parser.add_argument("--cases", type=float, default=float("inf"), help="for each kind (default: no limit)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same cases (default: 0)")
    options = parser.parse_args()
    for kind in options.kinds or (*KINDS, SCANNER):
        if kind == SCANNER:
            with tempfile.TemporaryDirectory() as work, NodeProcess(Path(work)) as node:
                scanner.scan(node)
            print(f"{kind:10} sees no program", flush=True)
            continue
        with tempfile.TemporaryDirectory() as work, besieged(Path(work)) as node:
            report = siege(node, KINDS[kind], options.seconds, cases=options.cases, seed=options.seed)
        print(
            f"{kind:10} {report.cases:>9} cases, slowest reply {report.slowest:.2f} s, memory {report.memory:.0f} MiB",
            flush=True,
        )
        assert report.slowest <= PATIENCE, f"a controller waited {report.slowest:.2f} s, at most {PATIENCE} are allowed"
        assert report.memory <= MEMORY, f"the node used {report.memory:.0f} MiB, at most {MEMORY} are allowed"


if __name__ == "__main__":
    main()
