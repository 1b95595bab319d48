"""Records terminals as drawings of docs/pictures: `python -m scripts.pictures.record run|top`.

`run` is `scripts/run` in this clone, until the node is ready: call it in a fresh one, with a HOME that may be seen.
`top` is `nodectl top` of a node with ten users, who move bytes while it looks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from html import escape
from itertools import groupby
from pathlib import Path

from scripts.bench.stage import KIND, Stage, stage
from scripts.staging import transfer
from scripts.staging.backend import backend, user
from scripts.staging.core import XrayClient
from scripts.staging.ports import free_port
from scripts.staging.terminal import Cell, Terminal
from scripts.staging.users import TestUser
from scripts.staging.wait import until

ROOT = Path(__file__).parents[2]
_WIDTH, _HEIGHT, _EDGE, _BAR = 7.9, 18, 14, 28
_BACK, _FRONT, _FRAME = "#0d1117", "#d0d7de", "#21262d"
_COLOURS = {
    "black": "#484f58",
    "red": "#ff7b72",
    "green": "#3fb950",
    "brown": "#d29922",
    "blue": "#58a6ff",
    "magenta": "#bc8cff",
    "cyan": "#39c5cf",
    "white": "#d0d7de",
    "brightblack": "#8b949e",
}
# Users of the recorded node, with the kilobytes that each gets and sends a second.
_USERS = {"alice": (9000, 300), "bruno": (4200, 150), "chen": (2500, 2100), "dilnoza": (1300, 40), "emma": (700, 60)}
_QUIET = ("farid", "grace", "hana", "ivan", "julia")
_SECONDS = 12.0


def recording(title: str, rows: Iterable[Iterable[Cell]]) -> str:
    """The drawing of a screen: colours and bold, each run of equal letters as wide as its cells."""
    lines = [list(row) for row in rows]
    while lines and not "".join(cell.letter for cell in lines[-1]).strip():
        lines.pop()
    width = _WIDTH * max(len(line) for line in lines) + 2 * _EDGE
    height = _BAR + _HEIGHT * len(lines) + _EDGE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" font-size="13" '
        'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace">'
    )
    frame = [
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{_BACK}"/>',
        f'<path d="M0 {_BAR - 6}H{width:g}" stroke="{_FRAME}"/>',
        f'<text x="{width / 2:g}" y="15" text-anchor="middle" fill="#8b949e" font-size="11">{escape(title)}</text>',
    ]
    drawn = [run for place, line in enumerate(lines) for run in _runs(line, _BAR + _HEIGHT * place + 13)]
    return "\n".join([head, *frame, *drawn, "</svg>", ""])


def _runs(line: list[Cell], y: float) -> Iterator[str]:
    place = 0
    for (front, bold, reverse), group in groupby(line, key=lambda cell: (cell.front, cell.bold, cell.reverse)):
        letters = "".join(cell.letter for cell in group)
        x, width = _EDGE + _WIDTH * place, _WIDTH * len(letters.rstrip() or letters)
        place += len(letters)
        colour = _COLOURS.get(front, f"#{front}" if len(front) == 6 and front.isalnum() else _FRONT)
        if reverse:
            yield f'<rect x="{x:g}" y="{y - 13:g}" width="{width:g}" height="{_HEIGHT}" fill="{colour}"/>'
        if letters.strip():
            weight = ' font-weight="600"' if bold else ""
            ink = _BACK if reverse else colour
            yield (
                f'<text x="{x:g}" y="{y:g}" fill="{ink}" textLength="{width:g}" xml:space="preserve"{weight}>'
                f"{escape(letters.rstrip())}</text>"
            )


def run() -> str:
    """`scripts/run` in this clone, from its first line until the node is ready."""
    with Terminal([str(ROOT / "scripts" / "run")], _environment(), ROOT, columns=112, rows=48) as terminal:
        terminal.find("Ctrl-C", timeout=600)
        cells = terminal.cells
        terminal.type("\x03")
        terminal.wait(60)
    return recording("scripts/run", cells)


def top() -> str:
    """`nodectl top` of a node whose users move bytes."""
    with stage() as on, _busy(on):
        nodes = on.directory / "nodes.toml"
        (on.directory / "key").touch(0o600)
        (on.directory / "key").write_text(on.node.key)
        nodes.write_text(
            f'[nodes.berlin]\naddress = "{on.node.host}"\nport = {on.node.rest_port}\nkey_file = "key"\n'
            f'certificate = "{on.node.certificate.certificate}"\n'
        )
        environment = {**_environment(), "PYTHONPATH": str(ROOT), "NODECTL_NODES": str(nodes)}
        command = [sys.executable, "-m", "node.nodectl", "top", "--node", "berlin"]
        with Terminal(command, environment, on.directory, columns=76, rows=20) as terminal:
            terminal.find("alice", "MiB/s", timeout=60)
            time.sleep(_SECONDS)  # Rates are those since the reading before.
            cells = terminal.cells
            terminal.type("q")
            terminal.wait(20)
    return recording("nodectl top --node berlin", cells)


def _environment() -> Mapping[str, str]:
    return {**{name: os.environ[name] for name in ("PATH", "HOME")}, "LANG": "C.UTF-8"}


@contextmanager
def _busy(on: Stage) -> Iterator[None]:
    """Users with connections through the node's core; some of them move bytes."""
    port, over = free_port(), threading.Event()
    people = {name: TestUser.new(name) for name in (*_USERS, *_QUIET)}
    ways = {name: free_port() for name in people}
    members = [user(person, {"in-0": KIND}) for person in people.values()]
    on.controller.start(backend([KIND.inbound(port, "in-0")], members, 0, ()))
    with ExitStack() as stack:
        stack.enter_context(XrayClient({ways[name]: KIND.outbound(port, people[name]) for name in people}))
        threads = [threading.Thread(target=_moves, args=(on, ways[name], _USERS.get(name), over)) for name in people]
        for thread in threads:
            thread.start()
        yield
        over.set()
        for thread in threads:
            thread.join()


def _moves(on: Stage, way: int, kilobytes: tuple[int, int] | None, over: threading.Event) -> None:
    link = until(lambda: transfer.connect(way, on.echo), 20, "a user is connected")
    with link, suppress(OSError):
        while not over.wait(0.2):
            if kilobytes:
                transfer.download(link, 200 * kilobytes[0])
                transfer.upload(link, 200 * kilobytes[1])


if __name__ == "__main__":
    _name = sys.argv[1]
    (ROOT / "docs" / "pictures" / f"terminal-{_name}.svg").write_text({"run": run, "top": top}[_name]())
