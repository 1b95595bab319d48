"""Reports of a run, as text and as JSON, and the table of checks for docs/conformance.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from tests.conformance.registry import CHECKS, Check, Level
from tests.conformance.runner import Outcome, Result

_SIGNS = {
    Outcome.PASSED: "ok",
    Outcome.FAILED: "FAILED",
    Outcome.UNSUPPORTED: "unsupported",
    Outcome.LEFT_OUT: "left out",
}


def holds(results: Iterable[Result], level: Level) -> bool:
    """Whether no check of this level, or of one before it, failed."""
    return all(result.outcome is not Outcome.FAILED for result in results if within(result.check, level))


def within(check: Check, level: Level) -> bool:
    levels = list(Level)
    return levels.index(check.level) <= levels.index(level)


def line(result: Result) -> str:
    """The text for a result."""
    head = f"{_SIGNS[result.outcome]:<12}{result.protocol:<5} {result.check.id:<24} {result.seconds:5.1f} s"
    return f"{head}  {result.check.title}" + (f"\n{'':12}{result.detail}" if result.detail else "")


def summary(results: Sequence[Result]) -> Iterator[str]:
    """A line with the outcomes of each level."""
    for level in Level:
        own = [result for result in results if result.check.level is level]
        counts = ", ".join(f"{sum(result.outcome is kind for result in own)} {kind}" for kind in Outcome)
        yield f"{level}: {counts}" if own else f"{level}: not checked"


def as_json(results: Sequence[Result], level: Level, node: str) -> str:
    rows = [
        {
            "id": result.check.id,
            "level": result.check.level,
            "protocol": result.protocol,
            "title": result.check.title,
            "outcome": result.outcome,
            "detail": result.detail,
            "seconds": round(result.seconds, 3),
        }
        for result in results
    ]
    return json.dumps({"node": node, "level": level, "holds": holds(results, level), "checks": rows}, indent=2) + "\n"


def table() -> str:
    """All checks as a Markdown table, for docs/conformance.md."""
    head = "| Check | Level | Protocols | What holds |\n| --- | --- | --- | --- |\n"
    return head + "".join(_row(check) for check in CHECKS.values())


def _row(check: Check) -> str:
    protocols = ", ".join({"rest": "REST", "grpc": "gRPC"}[protocol] for protocol in check.protocols)
    marks = {"optional": check.optional, "Xray": len(check.cores) == 1, "same machine": check.local}
    more = [mark for mark, given in marks.items() if given]
    title = check.title + (f" ({', '.join(more)})" if more else "")
    return f"| [`{check.id}`](interface.md#{check.section}) | {check.level} | {protocols} | {title} |\n"
