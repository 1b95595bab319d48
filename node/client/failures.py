"""What a call can fail with, as classes: those of `node.errors` where the node said so, and here where it said nothing.

REST's JSON has the error's word. Over gRPC, and in the dialect of deployed clients, there are a status and a text; what
they leave open is told by how the text begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from node import errors
from node.api.auth import Dialect
from node.api.methods import Method
from node.errors import KINDS, NodeError


class NoReply(NodeError):
    """There is no answer of the node's: whether it has done what was asked is not known."""

    code, http, grpc = "no_reply", 502, "UNKNOWN"


class Unreachable(NoReply):
    """No connection, none that can be trusted, or one that broke before the answer was here."""

    code, http, grpc = "unreachable", 503, "UNAVAILABLE"


class StreamEnded(Unreachable):
    """The node has ended a stream in good order."""

    def __init__(self) -> None:
        super().__init__("the node has ended the stream")


class DeadlineExceeded(NoReply):
    """The answer is not here in time. The node may still do what was asked."""

    code, http, grpc = "deadline_exceeded", 504, "DEADLINE_EXCEEDED"


class UnexpectedReply(NoReply):
    """An answer that no node of this interface gives: something else is listening there."""

    code = "unexpected_reply"


# How the texts begin of kinds that share their status with others.
_BEGINNINGS: dict[type[NodeError], tuple[str, ...]] = {
    errors.Internal: ("internal error",),
    errors.NotInitialized: (errors.NotInitialized().text,),
    errors.NotStarted: (errors.NotStarted("").text,),
    errors.ShuttingDown: (errors.ShuttingDown().text,),
    errors.Crowded: (errors.Crowded().text,),
    errors.UsersRefused: (errors.UsersRefused([]).text,),
    # The second is gRPC's own.
    errors.UnknownPath: ("there is no such path", "Method not found!"),
    errors.WrongVerb: ("this path takes other HTTP methods",),
}
# What is not about the configuration in a refused Start.
_MALFORMED = "the body is not a "
# How gRPC's own words begin for a connection that does not come about or broke.
_BROKEN = (
    "failed to connect",
    "Stream removed",
    "Socket closed",
    "Cancelling all calls",
    "GOAWAY",
    "DNS resolution failed",
    "Connection reset",
    "Broken pipe",
    "Endpoint closing",
    "Transport closed",
    "empty address list",
    "keepalive",
    "ping timeout",
    "recvmsg",
    "sendmsg",
    # The node's words, which is there again in a second.
    "the node becomes another version",
)


def of_http(method: Method, status: int, body: bytes, dialect: Dialect) -> NodeError:
    """The error that a REST response other than 200 stands for."""
    text = body.decode("utf-8", "replace")
    if dialect is Dialect.DEPLOYED:
        return _meant(method, text, lambda kind: kind.http == status) or _unexpected(f"{status}: {text}")
    try:
        said = json.loads(text)
        words = str(said["error"]), str(said["code"])
    except (ValueError, LookupError, TypeError):
        return _unexpected(f"{status}: {text}")
    kind = next((kind for kind in KINDS if (kind.code, kind.http) == (words[1], status)), None)
    return _unexpected(f"{status}: {text}") if kind is None else kind.told(words[0])


def of_grpc(method: Method, status: str, text: str, connected: bool) -> NodeError:
    """The error that a gRPC status other than OK stands for; `connected`: the connection is still there."""
    if status == "CANCELLED" or (status == "UNAVAILABLE" and text.startswith(_BROKEN)):
        return Unreachable(text)
    found = _meant(method, text, lambda kind: kind.grpc == status)
    if found is None:
        return _unexpected(f"{status}: {text}")
    # A core that failed says so in words of its own; so may gRPC.
    return found if connected or not isinstance(found, errors.CoreFailed) else Unreachable(text)


def _meant(method: Method, text: str, fits: Callable[[type[NodeError]], bool]) -> NodeError | None:
    """The kind among those of a status: by the beginning of its text, else one that has no certain beginning."""
    kinds = list(filter(fits, KINDS))
    known = [kind for kind in kinds if text.startswith(_BEGINNINGS.get(kind, ()))]
    open_ones = [kind for kind in kinds if kind not in _BEGINNINGS]
    if errors.InvalidConfig in open_ones and method.name == "Start" and not text.startswith(_MALFORMED):
        open_ones = [errors.InvalidConfig]
    return next((kind.told(text) for kind in (*known, *open_ones, *kinds)), None)


def _unexpected(said: str) -> NodeError:
    return UnexpectedReply(f"this is no answer of a node: {said[:500]}")
