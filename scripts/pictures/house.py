"""The floors of the node as a drawing, from the diagram in docs/architecture.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from scripts.pictures import drawing
from scripts.pictures.drawing import arrow, box, text, width_of

_WIDTH, _LEFT, _RIGHT, _TOP, _FLOOR, _CORE = 800, 16, 640, 46, 52, 62


@dataclass(frozen=True)
class Floor:
    """Folders that may import only those of the floors below, and what they do."""

    rooms: tuple[str, ...]
    words: str


def floors(page: str) -> list[Floor]:
    """The floors in the second diagram of the page, the highest first."""
    [diagram] = [
        block
        for block in re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        if "├──" in block and "┌──" in block
    ]
    top, _, _ = diagram.partition("\n└")
    inside = [line[1:].partition("│")[0] for line in top.splitlines() if line.startswith(("│", "├"))]
    found: list[list[str]] = [[]]
    for line in inside:
        if line.startswith("─"):
            found.append([])
        elif line.strip():
            found[-1].append(line.strip())
    return [_floor(lines) for lines in found if lines]


def _floor(lines: list[str]) -> Floor:
    if len(lines) == 1:
        room, _, words = lines[0].partition(": ")
        return Floor((room,), words)
    return Floor(tuple(re.split(r"\s{2,}", lines[0])), " ".join(lines[1:]))


def house(page: str) -> str:
    """The drawing of the page's diagram."""
    rows = floors(page)
    bottom = _TOP + _FLOOR * len(rows)
    users = (_RIGHT + _WIDTH) / 2
    parts = [
        text(_LEFT, 18, "controllers, by REST and gRPC over TLS", bold=True, colour=drawing.STRONG),
        arrow(f"M{_LEFT + 20} 26V{_TOP}"),
        text(users, 18, "users", "middle", bold=True, colour=drawing.STRONG),
        arrow(f"M{users} 26V{bottom + 28}"),
        text(users, (_TOP + bottom) / 2, "VLESS, Trojan, …", "middle", colour=drawing.FAINT, halo=True),
    ]
    for place, floor in enumerate(rows):
        y = _TOP + _FLOOR * place
        parts += [box(_LEFT, y, _RIGHT - _LEFT, _FLOOR - 4), *_rooms(floor, y + 20)]
        parts.append(text(_LEFT + 10, y + 39, floor.words, colour=drawing.FAINT))
    middle = (_LEFT + _RIGHT) / 2
    parts += [
        arrow(f"M{middle} {bottom - 4}V{bottom + 28}"),
        text(middle + 10, bottom + 16, "its API; configuration in, log lines out", colour=drawing.FAINT),
        box(_LEFT, bottom + 28, _WIDTH - 2 * _LEFT, _CORE - 12, "#f6efe3", "#d8b878"),
        text(_LEFT + 10, bottom + 48, "the core: Xray or sing-box", bold=True),
        text(
            _LEFT + 10, bottom + 67, "a child of the keeper, as the node is: it outlives the node", colour=drawing.FAINT
        ),
        text(_WIDTH - _LEFT - 10, bottom + 57, "to the internet →", "end", bold=True, colour=drawing.STRONG),
    ]
    return drawing.drawing(
        "The node's folders: each floor imports only those below it", _WIDTH, bottom + _CORE + 28, parts
    )


def _rooms(floor: Floor, y: float) -> list[str]:
    drawn, x = [], _LEFT + 10.0
    for room in floor.rooms:
        drawn.append(text(x, y, room, bold=True))
        x += width_of(room) * 1.1 + 28
    return drawn
