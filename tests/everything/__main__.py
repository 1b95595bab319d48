"""`python -m tests.everything [--core NAME] [--course NAME] [--seed N] [--rounds N]`: run rounds on a new node.

Exit status 1 if there was any fault. The seed is that of the first round; each further round has the next number.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.everything.options import CORES, COURSES, Options
from tests.everything.rounds import run


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.everything", description=__doc__)
    parser.add_argument("--core", choices=list(CORES), default="xray")
    parser.add_argument(
        "--course", choices=list(COURSES), default="harmed", help="what may happen in a round; see options.py"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first round (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--seconds", type=float, help="of work in each round (default: the course's)")
    given = parser.parse_args(argv)
    course = COURSES[given.course]
    if given.seconds is not None:
        course = replace(course, seconds=given.seconds)
    with tempfile.TemporaryDirectory() as directory:
        faults = run(Options(given.core, given.seed, given.rounds, course), Path(directory))
    print(f"{len(faults)} faults" if faults else "no faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
