"""The figures that count, with their goals and floors, in one table; and whether they are worse than they were.

`python -m scripts.bench.all --quick` takes less than five minutes. Without it there are more rounds, and how cost grows
with users and inbounds. `--peer` names the executable of another node of this interface, which is then measured beside.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from scripts.bench import boot, growth
from scripts.bench.arena import Arena, arena
from scripts.bench.calls import chunk_rows, core_alone, info_rows, start_rows, stats_rows, update_rows
from scripts.bench.day import day_rows
from scripts.bench.lines import line_rows
from scripts.bench.results import Row, from_json, line, markdown, merged, regressions, table, to_json
from scripts.bench.stage import machine

# How often each side has its turn.
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
    return told(regressions(rows, before))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m scripts.bench.all", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and not how cost grows")
    parser.add_argument("--peer", type=Path, metavar="PATH", help="the executable of another node of this interface")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures there, as JSON")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with figures saved there")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page, too")
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, BOOT], help="these parts of the table")
    return parser


def measured(name: str, given: argparse.Namespace, before: Sequence[Row]) -> list[Row]:
    """The rows of a section; where one is worse than before, it is measured once more: noise only adds."""
    rows = printed(section(name, given))
    if not regressions(rows, before):
        return rows
    print("  once more:")
    return merged(rows, printed(section(name, given)))


def section(name: str, given: argparse.Namespace) -> Iterator[Row]:
    """In nodes of its own."""
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


def told(found: Sequence[tuple[Row, float]]) -> int:
    for row, share in found:
        print(f"worse by {share:.0%}, its floor considered: {row.name}")
    return int(bool(found))


if __name__ == "__main__":
    # For whoever ends it that way: nodes and cores are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
