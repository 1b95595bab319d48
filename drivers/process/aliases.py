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
_END = r"(?:\x1f\d+)?$"
# The parts of a regular expression (RE2) that may match more than one character that they show.
_PART = re.compile(
    r"\\Q.*?(?:\\E|\Z)|\\[pP](?:\{[^}]*\}|.)|\\x\{[^}]*\}|\\.|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|.", re.DOTALL
)
# In brackets: what these parts match, without the separator.
_LAST = "\U0010ffff"
_BUT_SEPARATOR = {
    r"\D": rf"\x00-\x1e\x20-/:-{_LAST}",
    r"\W": rf"\x00-\x1e\x20-/:-@\[-\^`\x7b-{_LAST}",
    r"\S": rf"\x00-\x08\x0b\x0e-\x1e!-{_LAST}",
}


class Aliases:
    """The names of users in one run of a core: in the inbound `tags[N]` a user is NAME, the separator, and N.

    In other inbounds users have their own names; without tags in all.
    """

    def __init__(self, tags: Sequence[str] = ()) -> None:
        self.tags = tuple(tags)
        self._ends = {tag: f"{SEPARATOR}{number}" for number, tag in enumerate(self.tags)}

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
        if not mark or not number.isdecimal() or int(number) >= len(self.tags):
            return counter
        tag, name = self.tags[int(number)], head.removeprefix(f"{_USER}>>>")
        return f"{Scope.USER_INBOUND.value}>>>{name}{SEPARATOR}{tag}>>>{kind}"


PLAIN = Aliases()


def unaliased(text: str) -> str:
    """Replace the core's names for users in a text by their own names, which never have the separator."""
    return _NUMBERED.sub("", text) if SEPARATOR in text else text


def _widened(user: str) -> str:
    """Return a pattern that matches the core's names if the given one matches the users' own names."""
    parts: list[str] = _PART.findall(user.removeprefix(PATTERN))
    depths = [*accumulate((part == "(") - (part == ")") for part in parts)]
    if not depths or min(depths) < 0 or depths[-1]:
        return user  # no pattern, or an invalid one, which the core ignores
    return rf"{PATTERN}^[^\x1f]*(?:{''.join(map(_part, parts))})[^\x1f]*{_END}"


def _part(part: str) -> str:
    """Return a part of a pattern so that it does not match the separator, and the end of a name where it is."""
    if part in ("$", r"\z"):
        return _END
    if part == ".":
        return r"[^\x1f\n]"
    if part in _BUT_SEPARATOR:
        return f"[{_BUT_SEPARATOR[part]}]"
    if part.startswith("[^") and len(part) > 2:
        # A bracket or hyphen stands for itself in the first place only.
        return rf"[^\x1f{chr(92) if part[2] in ']-' else ''}{part[2:]}"
    if part.startswith("[") and len(part) > 1:
        return re.sub(r"\\.", lambda match: _BUT_SEPARATOR.get(match[0], match[0]), part, flags=re.DOTALL)
    return part
