"""All main figures in one table, with the floors that they are compared with, and a check for regressions.

`python -m scripts.bench.all --quick` takes less than five minutes. Without `--quick` there are more rounds, and a table
of how cost grows with users and inbounds. `--peer` measures another node of this interface for comparison.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from scripts.bench import boot, growth
from scripts.bench.arena import Arena, arena
from scripts.bench.calls import chunk_rows, connected_rows, core_alone, info_rows, start_rows, stats_rows, update_rows
from scripts.bench.day import day_rows
from scripts.bench.lines import line_rows
from scripts.bench.results import Row, from_json, line, markdown, merged, regressions, table, to_json
from scripts.bench.stage import machine

# Rounds of each side.
QUICK, WHOLE = 3, 7
FEW, MANY = 10_000, 50_000
Section = Callable[[Arena], Iterator[Row]]


def _starts(among: Arena) -> Iterator[Row]:
    yield from start_rows(among, FEW)
    yield from start_rows(among, MANY)


def _calls(among: Arena) -> Iterator[Row]:
    among.crowd(FEW)
    yield from info_rows(among)
    with core_alone(among, FEW) as (core, target):
        yield from update_rows(among, core, target)
        yield from chunk_rows(among, core, target)
    yield from connected_rows(among)


def _day(among: Arena) -> Iterator[Row]:
    among.crowd(FEW)
    yield from day_rows(among)


def _lines(among: Arena) -> Iterator[Row]:
    among.crowd(1)
    yield from line_rows(among)


def _stats(among: Arena) -> Iterator[Row]:
    among.crowd(MANY)
    yield from stats_rows(among)


SECTIONS: dict[str, Section] = {"starts": _starts, "calls": _calls, "stats": _stats, "day": _day, "lines": _lines}
BOOT = "boot"


def main(argv: Sequence[str]) -> int:
    given = arguments().parse_args(argv)
    before = from_json(given.against.read_text()) if given.against else []
    print(begun := machine())
    print(table([])[0])
    rows = [row for name in given.only or (*SECTIONS, BOOT) for row in measured(name, given, before)]
    print(machine())
    if given.save:
        given.save.write_text(to_json(rows, begun))
    if given.markdown:
        print(*markdown(rows), sep="\n")
    if not given.quick and not given.only:
        growth.main()
    return reported(regressions(rows, before))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m scripts.bench.all", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no table of how cost grows")
    parser.add_argument("--peer", type=Path, metavar="PATH", help="the executable of another node to compare with")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures to FILE as JSON")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with figures of --save; exit 1 if one is worse"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown, too")
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, BOOT], help="only these parts of the table")
    return parser


def measured(name: str, given: argparse.Namespace, before: Sequence[Row]) -> list[Row]:
    """The rows of a section. If one is worse than before, measure again and keep the better: noise only adds."""
    rows = printed(section(name, given))
    if not regressions(rows, before):
        return rows
    print("  worse than before, measured again:")
    return merged(rows, printed(section(name, given)))


def section(name: str, given: argparse.Namespace) -> Iterator[Row]:
    """Run a section on its own nodes."""
    rounds = QUICK if given.quick else WHOLE
    if name == BOOT:
        yield from boot.boot_rows(given.peer, rounds)
    else:
        with arena(given.peer, rounds) as among:
            yield from SECTIONS[name](among)


def printed(rows: Iterable[Row]) -> list[Row]:
    found = []
    for row in rows:
        print(line(row), flush=True)
        found.append(row)
    return found


def reported(found: Sequence[tuple[Row, float]]) -> int:
    """Print the regressions. Returns the exit status: 1 if there are any."""
    for row, share in found:
        print(f"regression: {row.name}: worse by {share:.0%}, relative to its floor")
    return int(bool(found))


if __name__ == "__main__":
    # So that TERM stops the nodes and cores as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
