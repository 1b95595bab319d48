"""A client of the whole interface, over REST and gRPC alike: what a controller, a command line or a test is made of.

`connect` makes a `Client` of a `Target`. Errors are those of `node.errors`, and `NoReply`. The node imports none of it.
"""

from node.client.client import DEADLINE, Client, connect
from node.client.events import EventStream
from node.client.failures import DeadlineExceeded, NoReply, StreamEnded, UnexpectedReply, Unreachable
from node.client.logs import LogStream
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
