"""A sequence of messages as a drawing, from a text.

The first line is the title, the second the parties, from left to right, between bars. Each other line is an event:

    A > B: words     a message
    A >> B: words    a reply, dashed
    A: words         what a party does by itself
    A +: words       a party begins
    A -: words       a party ends
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from scripts.pictures import drawing
from scripts.pictures.drawing import arrow, box, plain, text, wrapped

_EVENT = re.compile(r"(?P<one>[\w ]+?) *(?:(?P<kind>>>|>|\+|-) *(?P<other>[\w ]*))?: (?P<words>.+)")
_COLUMN, _HEAD, _ROW, _SPACE, _HALF = 150, 34, 17, 18, 5


@dataclass
class _Party:
    name: str
    x: float
    # Where its life begins and ends; the other parties live all the time.
    since: float = _HEAD
    until: float | None = None
    begins: bool = False


@dataclass
class _Sheet:
    parties: dict[str, _Party]
    width: float
    y: float = _HEAD + _SPACE
    parts: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Draw an event below the others."""
        found = _EVENT.fullmatch(line)
        if not found:
            raise ValueError(f"no event: {line}")
        one, kind, words = self.parties[found["one"]], found["kind"], found["words"]
        if kind in (">", ">>"):
            self._message(one, self.parties[found["other"]], words, dashed=kind == ">>")
            return
        if kind == "+":
            one.since, one.begins = self.y, True
        self._words(one.x + 2 * _HALF, words, self.width - one.x - 3 * _HALF)
        if kind == "-":
            one.until = self.y - _SPACE / 2

    def _message(self, one: _Party, other: _Party, words: str, dashed: bool) -> None:
        left, right = sorted((one.x, other.x))
        self._words(left + 2 * _HALF, words, max(right - left - 4 * _HALF, 1.6 * _COLUMN), below=4)
        side = _HALF if other.x > one.x else -_HALF
        y = self.y - _SPACE + 4
        self.parts.append(arrow(f"M{one.x + side:g} {y:g}H{other.x - side:g}", dashed=dashed))

    def _words(self, x: float, words: str, room: float, below: float = 0) -> None:
        for line in wrapped(words, room):
            self.y += _ROW
            self.parts.append(text(x, self.y - 4, line, halo=True))
        self.y += _SPACE + below

    def lives(self) -> list[str]:
        """The parties, with the time that each lives."""
        drawn = []
        for party in self.parties.values():
            bottom = party.until or self.y
            drawn.append(plain(f"M{party.x:g} {_HEAD}V{self.y:g}", dashed=True))
            drawn.append(box(party.x - _HALF, party.since, 2 * _HALF, bottom - party.since))
            drawn.append(text(party.x, 22, party.name, "middle", bold=True, colour=drawing.STRONG))
        return drawn


def sequence(source: str) -> str:
    """The drawing of a text."""
    title, names, *events = [line for line in source.splitlines() if line.strip()]
    parties = [name.strip() for name in names.split("|")]
    places = {name: _Party(name, _COLUMN * (place + 0.5)) for place, name in enumerate(parties)}
    sheet = _Sheet(places, _COLUMN * len(parties) + 0.3 * _COLUMN)
    for event in events:
        sheet.add(event)
    return drawing.drawing(title, sheet.width, sheet.y + 6, [*sheet.lives(), *sheet.parts])
