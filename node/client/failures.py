"""The errors of a client's calls: those of `node.base.errors` for the node's own, and those here without a reply.

REST's JSON has the error's code. Over gRPC, and in the dialect of deployed clients, there are only a status and a text;
where several errors have the same status, the beginning of the text decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from node.api.auth import Dialect
from node.api.methods import Method
from node.base import errors
from node.base.errors import KINDS, NodeError


class NoReply(NodeError):
    """The node has not answered: it is unknown whether it has processed the call."""

    code, http, grpc = "no_reply", 502, "UNKNOWN"


class Unreachable(NoReply):
    """The connection failed, cannot be trusted, or broke before the answer arrived."""

    code, http, grpc = "unreachable", 503, "UNAVAILABLE"


class StreamEnded(Unreachable):
    """The node has ended a stream gracefully."""

    def __init__(self) -> None:
        super().__init__("the node has ended the stream")


class DeadlineExceeded(NoReply):
    """The answer did not arrive in time. The node may still process the call."""

    code, http, grpc = "deadline_exceeded", 504, "DEADLINE_EXCEEDED"


class UnexpectedReply(NoReply):
    """The answer is not a node's: some other server is listening there."""

    code = "unexpected_reply"


# The beginnings of the texts of errors that share their status with others.
_BEGINNINGS: dict[type[NodeError], tuple[str, ...]] = {
    errors.Internal: ("internal error",),
    errors.NotInitialized: (errors.NotInitialized().text,),
    errors.NotStarted: (errors.NotStarted("").text,),
    errors.ShuttingDown: (errors.ShuttingDown().text,),
    errors.Crowded: (errors.Crowded().text,),
    errors.UsersRefused: (errors.UsersRefused([]).text,),
    # The second text is gRPC's own.
    errors.UnknownPath: ("there is no such path", "Method not found!"),
    errors.WrongVerb: ("this path takes other HTTP methods",),
}
# Begins the error of a Start that was refused for its body, and not for its configuration.
_MALFORMED = "the body is not a "
# Begins gRPC's own text for an answer in plain HTTP, as of a proxy on the way.
_PLAIN_HTTP = "Received http2 header with status"
# The beginnings of gRPC's own texts for a connection that failed or broke.
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
    # The node's own text at a hand-over; it serves again within a second.
    "the node becomes another version",
)


def of_http(method: Method, status: int, body: bytes, dialect: Dialect) -> NodeError:
    """Return the error of a REST response with a status other than 200."""
    text = body.decode("utf-8", "replace")
    if dialect is Dialect.DEPLOYED:
        return _guessed(method, text, lambda kind: kind.http == status) or _unexpected(f"{status}: {text}")
    try:
        fields = json.loads(text)
        error, code = str(fields["error"]), str(fields["code"])
    except (ValueError, LookupError, TypeError):
        return _unexpected(f"{status}: {text}")
    kind = next((kind for kind in KINDS if (kind.code, kind.http) == (code, status)), None)
    return _unexpected(f"{status}: {text}") if kind is None else kind.of_text(error)


def of_grpc(method: Method, status: str, text: str, connected: bool) -> NodeError:
    """Return the error of a gRPC status other than OK. `connected`: the connection is still open."""
    if status == "CANCELLED" or (status == "UNAVAILABLE" and text.startswith(_BROKEN)):
        return Unreachable(text)
    found = _guessed(method, text, lambda kind: kind.grpc == status)
    if found is None or text.startswith(_PLAIN_HTTP):
        return _unexpected(f"{status}: {text}")
    # The text of a failed core begins in any way, as may gRPC's own.
    return found if connected or not isinstance(found, errors.CoreFailed) else Unreachable(text)


def _guessed(method: Method, text: str, fits: Callable[[type[NodeError]], bool]) -> NodeError | None:
    """Return the error of a status: the kind that the text's beginning matches, else one without a fixed beginning."""
    kinds = list(filter(fits, KINDS))
    known = [kind for kind in kinds if text.startswith(_BEGINNINGS.get(kind, ()))]
    open_ones = [kind for kind in kinds if kind not in _BEGINNINGS]
    if errors.InvalidConfig in open_ones and method.name == "Start" and not text.startswith(_MALFORMED):
        open_ones = [errors.InvalidConfig]
    return next((kind.of_text(text) for kind in (*known, *open_ones, *kinds)), None)


def _unexpected(answer: str) -> NodeError:
    return UnexpectedReply(f"this is not the answer of a txnode: {answer[:500]}")
