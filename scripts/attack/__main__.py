"""`python -m scripts.attack [KIND ...] [--seconds 60] [--cases N] [--seed N]`: attack a node of its own, kind by kind.

The node has a core that runs. Each kind goes on for so many seconds, or until there were so many cases; it fails when
the node answers with a fault of its own, or a controller waits for longer than a second, or its memory exceeds a bound,
or it keeps connections, or a traceback stands in its log. The seed says which cases are made.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from scripts.attack.kinds import KINDS
from scripts.attack.siege import MEMORY, besieged, siege

# Seconds that a controller may wait.
PATIENCE = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.attack")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for kind in options.kinds or KINDS:
        with tempfile.TemporaryDirectory() as work, besieged(Path(work)) as node:
            report = siege(node, KINDS[kind], options.seconds, cases=options.cases, seed=options.seed)
        print(
            f"{kind:10} {report.cases:>9} cases, slowest answer {report.slowest:.2f} s, {report.memory:.0f} MiB",
            flush=True,
        )
        assert report.slowest <= PATIENCE, "a controller waited"
        assert report.memory <= MEMORY, "the node took too much memory"


if __name__ == "__main__":
    main()
