"""The interface between `Client` and its transports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from google.protobuf.message import Message

from node.api.methods import Method
from node.client.inbox import Inbox
from protos.service_pb2 import Event

# The header, or the metadata, with the place of the line after which a stream resumes.
LAST = "last-event-id"


class Line(NamedTuple):
    """The text of a log line, and its place in the node's log; older nodes send no places."""

    text: str
    place: str = ""

    @property
    def log(self) -> str:
        """The name of the log that the place belongs to: each start of a node begins another one."""
        return self.place.partition("@")[2]


class Transport(Protocol):
    """Sends calls to one node. All methods raise `NodeError`; cancelling a call ends it on this side."""

    async def call(self, method: Method, messages: Sequence[Message]) -> bytes:
        """Call a method with one message, or with a feed of them. Returns the serialised reply."""

    async def lines(self, method: Method, last: str) -> Inbox[Line]:
        """Open a stream of log lines, from after the place `last` if the node knows places.

        The inbox ends with the error that ended the stream.
        """

    async def events(self, method: Method, request: Message) -> Inbox[Event]:
        """Open a stream of events, as above."""

    async def close(self) -> None:
        """End all connections."""
