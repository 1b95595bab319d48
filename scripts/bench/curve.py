"""A line chart as SVG, over time or another quantity, in colours that are legible on white and on black."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 92, 34, 40
_TEXT = "#7a8490"
_LINES = ("#2f81f7", "#d9822b", "#2da44e")
_STEPS = (1, 2, 5)
_HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" \
font-family="system-ui, sans-serif" font-size="12" fill="{_TEXT}">"""

Points = Sequence[tuple[float, float]]


def minutes(number: float) -> str:
    """The label of a time."""
    return f"{number:g} min" if number else "0"


def picture(title: str, unit: str, curves: Mapping[str, Points], label: Callable[[float], str] = minutes) -> str:
    """The chart. Each curve, by its name, has points of minutes and a figure in this unit. Both axes begin at 0.

    With another `label` the points may be of another quantity than minutes.
    """
    last = max(x for points in curves.values() for x, _ in points)
    top = step(max(y for points in curves.values() for _, y in points)) * 5
    frame = _Frame(last, top)
    rows = [_HEAD, f"<title>{escape(title)}</title>", text(_LEFT, 18, f"{title}, {unit}")]
    rows += [frame.across(level * top / 5) for level in range(6)]
    rows += [frame.below(place, label(place)) for place in _places(last)]
    for (name, points), colour in zip(curves.items(), _LINES, strict=False):
        rows += [frame.line(points, colour), frame.name(points, name, colour)]
    return "\n".join([*rows, "</svg>", ""])


def step(largest: float, parts: int = 5) -> float:
    """The smallest round step (1, 2 or 5 times a power of ten) with `parts` times the step at least `largest`."""
    power = 1e-3
    while True:
        for digit in _STEPS:
            if digit * power * parts >= largest:
                return digit * power
        power *= 10


def _places(last: float) -> list[float]:
    apart = step(last, 6)
    return [number * apart for number in range(int(last / apart + 1e-9) + 1)]


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = _TEXT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


class _Frame:
    def __init__(self, last: float, top: float) -> None:
        self._last, self._top = last, top

    def across(self, level: float) -> str:
        y = self._y(level)
        rule = f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_TEXT}" stroke-opacity="0.3"/>'
        return rule + text(_LEFT - 8, y + 4, f"{level:g}", "end")

    def below(self, place: float, words: str) -> str:
        return text(self._x(place), _HEIGHT - 16, words, "middle")

    def line(self, points: Points, colour: str) -> str:
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    def name(self, points: Points, name: str, colour: str) -> str:
        """The curve's label, right of its end."""
        return text(_WIDTH - _RIGHT + 8, self._y(points[-1][1]) + 4, name, colour=colour)

    def _x(self, minute: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * minute / self._last

    def _y(self, level: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * level / self._top
