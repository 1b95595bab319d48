"""The names by which a core knows users with USER_INBOUNDS: one for each inbound, so that it counts each apart. Pure.

Only a core has these names. The node puts them into what it sends to the core, and takes them out of what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate

from node.contract.counters import SEPARATOR, Scope

_NUMBERED = re.compile(rf"{SEPARATOR}\d+")
_USER = Scope.USER.value
# The core takes a name in a routing rule that begins so for a regular expression, if more follows.
PATTERN = "regexp:"
# How names end, in a regular expression.
_END = r"(?:(?:\x1f\d+)?$)"
_CLASS = r"\\[pP](?:\{[^}]*(?:\}|\Z)|.)|\[:\^?\w+:\]"
_CHARACTER = r"\\x\{[^}]*(?:\}|\Z)|\\x[\da-fA-F]{2}|\\[0-7]{1,3}|\\.|."
# The parts of a regular expression (RE2). One without its end has the rest of the text, so that no text takes long.
_PART = re.compile(
    r"\\Q.*?(?:\\E|\Z)|\\[pP](?:\{[^}]*(?:\}|\Z)|.)"
    rf"|\[(?:\^\]|\]|\^(?!\])|(?![\]^]))(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|(?P<open>\[.*)|{_CHARACTER}",
    re.DOTALL,
)
# The parts of what is in brackets.
_ITEM = re.compile(f"{_CLASS}|{_CHARACTER}", re.DOTALL)
# A part that is a class of characters, which may have the separator.
_MANY = re.compile(rf"{_CLASS}|\\[DWS]", re.DOTALL)
_CONTROLS = dict(zip("afnrtv", b"\a\f\n\r\t\v", strict=True))


class Aliases:
    """The names of users in one run of a core: in the inbound `tags[N]` a user is NAME, the separator, and N.

    In other inbounds users have their own names; without tags in all.
    """

    def __init__(self, tags: Sequence[str] = ()) -> None:
        self.tags = tuple(tags)
        self._ends = {tag: f"{SEPARATOR}{number}" for number, tag in enumerate(self.tags)}
        self._numbered = {str(number): tag for number, tag in enumerate(self.tags)}

    def __bool__(self) -> bool:
        return bool(self.tags)

    def end(self, tag: str) -> str:
        """What follows a user's own name in this inbound."""
        return self._ends.get(tag, "")

    def all(self, name: str) -> list[str]:
        """All names that the core may have for this user."""
        return [name, *(name + end for end in self._ends.values())]

    def fitting(self, users: Sequence[str]) -> list[str]:
        """The users of a routing rule: those that fit the core's names as the given ones fit the users' own names."""
        if not self:
            return [*users]
        return [fits for user in users for fits in ([_widened(user)] if user.startswith(PATTERN) else self.all(user))]

    def read(self, counters: Mapping[str, int]) -> Mapping[str, int]:
        """Counters as the core has them, as those of a `Reading`."""
        return {self._read(name): value for name, value in counters.items()} if self else counters

    def _read(self, counter: str) -> str:
        head, mark, rest = counter.partition(SEPARATOR)
        number, _, kind = rest.partition(">>>")
        tag, name = self._numbered.get(number), head.removeprefix(f"{_USER}>>>")
        # The configuration may have tags, and names in inbounds that are not managed, with any characters.
        if not mark or tag is None or name == head:
            return counter
        return f"{Scope.USER_INBOUND.value}>>>{name}{SEPARATOR}{tag}>>>{kind}"


PLAIN = Aliases()


def unaliased(text: str) -> str:
    """Replace the core's names for users in a text by their own names, which never have the separator."""
    return _NUMBERED.sub("", text) if SEPARATOR in text else text


def _widened(user: str) -> str:
    """Return a pattern that matches the core's names if the given one matches the users' own names."""
    if user == PATTERN:
        return rf"{PATTERN}^{PATTERN}{_END}"  # a name, but with an end it would be a pattern
    found = [*_PART.finditer(user.removeprefix(PATTERN))]
    parts = [match[0] for match in found]
    depths = [*accumulate((part == "(") - (part == ")") for part in parts)]
    if min(depths) < 0 or depths[-1] or found[-1]["open"]:
        return user  # an invalid pattern, which the core ignores
    return rf"{PATTERN}^[^\x1f]*(?:{''.join(map(_part, parts))})[^\x1f]*{_END}"


def _part(part: str) -> str:
    """Return a part of a pattern so that it does not match the separator, and the end of a name where it is."""
    if part in ("$", r"\z"):
        return _END
    if part == ".":
        return r"[^\x1f\n]"
    if part.startswith(r"\Q"):
        return part if part.endswith(r"\E") else rf"{part}\E"
    if part.startswith("[^"):
        # A bracket or hyphen stands for itself in the first place only.
        return rf"[^\x1f{chr(92) if part[2] in ']-' else ''}{part[2:]}"
    if part.startswith("["):
        return _bracket(part)
    return _others(part) if _MANY.fullmatch(part) else part


def _others(many: str) -> str:
    """A class of characters without the separator. Under (?i), too, it is all but the class of all others."""
    if many.startswith("[:"):
        return rf"[^\x1f{many.replace('[:^', '[:') if many.startswith('[:^') else many.replace('[:', '[:^')}]"
    return rf"[^\x1f{many[0]}{many[1].swapcase()}{many[2:]}]"


def _bracket(part: str) -> str:
    """One of several characters, without the separator if it is in a range or a class of these."""
    items, kept, apart = _ITEM.findall(part[1:-1])[::-1], list[str](), list[str]()
    while items:
        item = items.pop()
        if _MANY.fullmatch(item):
            apart.append(_others(item))
            if items[-1:] == ["-"]:
                items[-1] = r"\-"  # no range begins with a class
        elif len(items) > 1 and items[-1] == "-" and item not in (r"\d", r"\w", r"\s"):
            if _MANY.fullmatch(items[-2]):
                return part  # invalid: a class ends no range
            kept.append(_range(item, items[-2]))
            del items[-2:]
        else:
            kept.append(item)
    first = [rf"[{'' if kept[0] != '^' else chr(92)}{''.join(kept)}]"] if kept else []
    return f"(?:{'|'.join([*first, *apart])})" if apart else "".join(first)


def _range(first: str, last: str) -> str:
    """A range in brackets without the separator."""
    if not _code(first) <= ord(SEPARATOR) < _code(last):
        return f"{first}-{last}"
    below = rf"{first}-\x1e" if _code(first) < ord(SEPARATOR) else ""
    return rf"{below}\x20-{last}"


def _code(item: str) -> int:
    """The code of a character in brackets; 0 for one that the core does not accept."""
    if len(item) == 1 or not item.startswith("\\"):
        return ord(item[0])
    try:
        if item[1] == "x":
            return int(item[2:].strip("{}"), 16)
        return int(item[1:], 8) if item[1] in "01234567" else _CONTROLS.get(item[1], ord(item[1]))
    except ValueError:
        return 0
