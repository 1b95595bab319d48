"""Parts begin, go on and end by one list, each whatever the others do."""

from __future__ import annotations

from twisted.internet.defer import ensureDeferred
from twisted.logger import capturedLogs

from node.base.part import Part, Parts


class Noting(Part):
    """A part that notes what it is asked to do, and may fail at it."""

    def __init__(self, name: str, words: list[str], fails: bool = False) -> None:
        self.title, self._words, self._fails = name, words, fails

    def _note(self, what: str) -> None:
        self._words.append(f"{what} {self.title}")
        if self._fails:
            raise ZeroDivisionError

    def begin(self) -> None:
        self._note("begin")

    def settle(self, outcome: str | None) -> None:
        self._note("settle")

    def stop(self) -> None:
        self._note("stop")

    def leave(self) -> None:
        self._note("leave")

    @property
    def unsteady(self) -> str:
        return self.title if self._fails else ""

    @property
    def warnings(self) -> list[str]:
        return [f"warning of {self.title}"]


def test_a_part_that_fails() -> None:
    """The others begin, go on and end all the same, in order; the log names the one that failed."""
    words: list[str] = []
    parts = Parts(Noting("a", words), Noting("b", words, fails=True))
    parts.add(Noting("c", words))
    with capturedLogs() as events:
        parts.begin()
        parts.settle(None)
        ensureDeferred(parts.leave())
        ensureDeferred(parts.stop())
    in_order, reverse = ("begin", "settle"), ("leave", "stop")
    expected = [f"{what} {name}" for what in in_order for name in "abc"]
    assert words == [*expected, *(f"{what} {name}" for what in reverse for name in "cba")]
    assert [event["part"] for event in events if "log_failure" in event] == ["b"] * 4
    assert parts.warnings == [f"warning of {name}" for name in "abc"]
    assert parts.unsteady == "b"
