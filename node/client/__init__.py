"""A client for the whole interface, over REST or gRPC, for controllers, command lines and tests.

`connect` makes a `Client` for a `Target`. Errors are those of `node.base.errors`, and `NoReply`. The node itself does
not import this package.
"""

from node.client.client import DEADLINE, Client, connect
from node.client.failures import DeadlineExceeded, NoReply, StreamEnded, UnexpectedReply, Unreachable
from node.client.stream import EventStream, LogStream
from node.client.target import Target

__all__ = [
    "DEADLINE",
    "Client",
    "DeadlineExceeded",
    "EventStream",
    "LogStream",
    "NoReply",
    "StreamEnded",
    "Target",
    "UnexpectedReply",
    "Unreachable",
    "connect",
]
