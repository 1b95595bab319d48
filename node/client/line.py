"""A log line as a client has it."""

from __future__ import annotations

from typing import NamedTuple

# The header, or the metadata, that says behind which line a stream is to go on.
LAST = "last-event-id"


class Line(NamedTuple):
    """What it says, and its place in the node's log; older nodes tell none."""

    text: str
    place: str = ""

    @property
    def log(self) -> str:
        """Whose places they are: each run of a node has a log of its own."""
        return self.place.partition("@")[2]
