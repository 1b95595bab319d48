"""How cost grows with users, as charts of the table that `scripts.bench.growth` printed into docs/benchmarks.md."""

from __future__ import annotations

from scripts.bench.curve import Points, picture

_HEADING = "\n### How cost grows\n"
_LISTS = {"Start": "Start ms", "1 % changed": "1 % ms", "the same list": "same ms"}


def columns(page: str) -> dict[str, Points]:
    """The figures of each column by its head, with the number of users: those on one inbound."""
    table = page.partition(_HEADING)[2].partition("\n|")[2].partition("\n\n")[0]
    head, _, *figures = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    single = [row for row in figures if row[0].replace(",", "").isdigit()]
    numbers = [[float(cell.replace(",", "")) for cell in row] for row in single]
    return {name: [(row[0], row[place]) for row in numbers] for place, name in enumerate(head) if place}


def lists(page: str) -> str:
    """The time until the reply to whole lists of users."""
    found = columns(page)
    curves = {name: found[column] for name, column in _LISTS.items()}
    return picture("Reply to a list of users", "ms", curves, _users)


def memory(page: str) -> str:
    """The memory of the node."""
    return picture("Memory of the node by users", "MiB", {"node": columns(page)["RSS MiB"]}, _users)


def _users(number: float) -> str:
    return f"{number:,.0f} users" if number else "0"
