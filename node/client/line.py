"""A log line in the client."""

from __future__ import annotations

from typing import NamedTuple

# The header, or the metadata, with the place of the line after which a stream resumes.
LAST = "last-event-id"


class Line(NamedTuple):
    """The text of a line, and its place in the node's log; older nodes send no places."""

    text: str
    place: str = ""

    @property
    def log(self) -> str:
        """The name of the log that the place belongs to: each start of a node begins another one."""
        return self.place.partition("@")[2]
