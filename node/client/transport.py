"""What a `Client` needs of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from google.protobuf.message import Message

from node.api.methods import Method
from node.client.inbox import Inbox
from node.client.line import Line
from protos.service_pb2 import Event


class Transport(Protocol):
    """Carries calls to one node. It raises `NodeError`; cancelling a call ends it on this side."""

    async def call(self, method: Method, messages: Sequence[Message]) -> bytes:
        """The serialised reply: to one message, or to a feed of them."""

    async def lines(self, method: Method, last: str) -> Inbox[Line]:
        """A stream of log lines that is open; the inbox ends with the error that ended it.

        It begins behind the line of the place `last`, where the node knows places.
        """

    async def events(self, method: Method, request: Message) -> Inbox[Event]:
        """A stream of events that is open, as above."""

    async def close(self) -> None:
        """End all connections."""
