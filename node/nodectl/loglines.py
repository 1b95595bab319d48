"""What is in a log line, as far as its core or the node says it, and which lines somebody wants. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from node.client.logs import CLIENT_MARK
from node.logs import NODE_MARK

# From the least to the most grave; lines of the node itself and of access logs have none.
LEVELS = ("debug", "info", "warning", "error")
SOURCES = ("core", "node")

# In brackets, or in capitals behind the time.
_LEVEL = re.compile(r"\[(Debug|Info|Warning|Error)\]|\b(TRACE|DEBUG|INFO|WARN|ERROR|FATAL|PANIC)\b")
_WORDS = {"trace": "debug", "warn": "warning", "fatal": "error", "panic": "error"}
# Characters at a line's beginning in which its level stands.
_HEAD = 80


def level(line: str) -> str:
    """One of LEVELS; empty where the line has none."""
    if source(line) == "node":
        return ""
    found = _LEVEL.search(line[:_HEAD])
    word = (found[1] or found[2]).lower() if found else ""
    return _WORDS.get(word, word)


def source(line: str) -> str:
    return "node" if line.startswith((NODE_MARK, CLIENT_MARK)) else "core"


@dataclass(frozen=True)
class Wanted:
    """Lines that fit all that was asked for. `least` is one of LEVELS: lines without one do not fit then."""

    pattern: re.Pattern[str] | None = None
    least: str = ""
    source: str = ""

    def fits(self, line: str) -> bool:
        return (
            (self.pattern is None or self.pattern.search(line) is not None)
            and (not self.source or source(line) == self.source)
            and (not self.least or level(line) in LEVELS[LEVELS.index(self.least) :])
        )
