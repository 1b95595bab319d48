"""Parse the source and level of log lines, and filter them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from node.base.logs import NODE_MARK
from node.client.logs import CLIENT_MARK

# From the least to the most severe. Lines of the node and of access logs have none.
LEVELS = ("debug", "info", "warning", "error")
SOURCES = ("core", "node")

# In brackets, or in capitals after the time.
_LEVEL = re.compile(r"\[(Debug|Info|Warning|Error)\]|\b(TRACE|DEBUG|INFO|WARN|ERROR|FATAL|PANIC)\b")
_WORDS = {"trace": "debug", "warn": "warning", "fatal": "error", "panic": "error"}
# Characters at a line's beginning that contain its level.
_HEAD = 80


def level(line: str) -> str:
    """The level of a line, one of LEVELS; empty if it has none."""
    if source(line) == "node":
        return ""
    found = _LEVEL.search(line[:_HEAD])
    word = (found[1] or found[2]).lower() if found else ""
    return _WORDS.get(word, word)


def source(line: str) -> str:
    return "node" if line.startswith((NODE_MARK, CLIENT_MARK)) else "core"


@dataclass(frozen=True)
class Wanted:
    """A filter of log lines; all conditions must hold. With `least`, one of LEVELS, lines need a level."""

    pattern: re.Pattern[str] | None = None
    least: str = ""
    source: str = ""

    def fits(self, line: str) -> bool:
        return (
            (self.pattern is None or self.pattern.search(line) is not None)
            and (not self.source or source(line) == self.source)
            and (not self.least or level(line) in LEVELS[LEVELS.index(self.least) :])
        )
