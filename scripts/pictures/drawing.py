"""Parts of SVG drawings on a white ground: the site turns them dark by inverting them."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK, FAINT, LINE, GROUND = "#1f2328", "#57606a", "#8c959f", "#ffffff"
# Of the floors and lifelines, from light to strong.
TINT, EDGE, STRONG = "#eef4fc", "#a9c4ea", "#2f66b8"
SIZE = 13
# The width of a letter of the sans-serif fonts of most systems, on average, in parts of its size.
_LETTER = 0.53


def drawing(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """A whole file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="{SIZE}" fill="{INK}">'
    )
    tip = (
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 1L9 5L0 9" fill="none" stroke="{FAINT}" stroke-width="1.5"/></marker></defs>'
    )
    ground = f'<rect width="{width:g}" height="{height:g}" fill="{GROUND}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", tip, ground, *parts, "</svg>", ""])


def text(
    x: float, y: float, words: str, anchor: str = "start", *, colour: str = INK, bold: bool = False, halo: bool = False
) -> str:
    """Words; with a `halo` of the ground, so that lines behind them do not cross them."""
    more = ' font-weight="600"' if bold else ""
    if halo:
        more += f' stroke="{GROUND}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"'
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = TINT, edge: str = EDGE) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{edge}"/>'


def arrow(path: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="{path}" fill="none" stroke="{FAINT}" stroke-width="1.5" marker-end="url(#tip)"{dashes}/>'


def plain(path: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="2 4"' if dashed else ""
    return f'<path d="{path}" fill="none" stroke="{LINE}"{dashes}/>'


def width_of(words: str) -> float:
    """About how wide the words are."""
    return len(words) * SIZE * _LETTER


def wrapped(words: str, room: float) -> list[str]:
    """The words in lines that fit into the room."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if width_of(longer) > room and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
