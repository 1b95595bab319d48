"""The errors of calls: one class for each kind, with its code, HTTP status and gRPC status. The text is for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Self

# Bytes of a text. gRPC clients drop a status whose headers have over 8 kB, and with it the error.
MAX_TEXT = 4096
# Characters of a name in a text.
MAX_NAME = 100

_MORE = "…"
# The bytes that gRPC percent-encodes, as three bytes each.
_ENCODED = re.compile(rb"[^ -$&-~]")


def shown(name: str) -> str:
    """Quote a name that a caller chose, for a text; cut after `MAX_NAME` characters."""
    return repr(name) if len(name) <= MAX_NAME else repr(name[:MAX_NAME]) + _MORE


def size(text: str) -> int:
    """Return the number of bytes that gRPC needs for a text, percent-encoded."""
    raw = text.encode("utf-8", "replace")
    return len(raw) + 2 * len(_ENCODED.findall(raw))


def cut(text: str, limit: int) -> str:
    """Cut a text to at most `limit` bytes, as gRPC encodes them."""
    if size(text[: limit + 1]) <= limit:
        return text
    room = limit - size(_MORE)
    for end, character in enumerate(text):
        room -= size(character)
        if room < 0:
            return text[:end] + _MORE
    return text


class NodeError(Exception):
    """A failure whose text the caller gets unchanged, cut to `MAX_TEXT` bytes.

    `code` is the code in REST's JSON body, `http` the status there, `grpc` the name of the status over gRPC.
    """

    code: ClassVar[str] = "internal"
    http: ClassVar[int] = 500
    grpc: ClassVar[str] = "INTERNAL"

    def __init__(self, text: str) -> None:
        self.text = cut(text, MAX_TEXT)
        super().__init__(self.text)

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Make this error in a client, from the text alone: the arguments it was made of are not known there."""
        error = cls.__new__(cls)
        NodeError.__init__(error, text)
        return error


class Internal(NodeError):
    """A fault in the node itself; the log has the traceback."""


class Unauthenticated(NodeError):
    """The request does not carry a key of the node."""

    code, http, grpc = "unauthenticated", 401, "UNAUTHENTICATED"

    def __init__(self, text: str = "missing or wrong API key") -> None:
        super().__init__(text)


class Forbidden(NodeError):
    """The key is valid, but its scope does not allow this call."""

    code, http, grpc = "forbidden", 403, "PERMISSION_DENIED"


class InvalidRequest(NodeError):
    """The body is not the method's request message, or has an invalid value."""

    code, http, grpc = "invalid_request", 400, "INVALID_ARGUMENT"


class InvalidConfig(NodeError):
    """The core, or the node on its behalf, refuses the configuration; the text has the core's own reason."""

    code, http, grpc = "invalid_config", 400, "INVALID_ARGUMENT"


class UnknownPath(NodeError):
    """No operation has this path."""

    code, http, grpc = "not_found", 404, "UNIMPLEMENTED"


class UnknownName(NodeError):
    """No user, inbound or outbound has this name."""

    code, http, grpc = "unknown_name", 404, "NOT_FOUND"


class WrongVerb(NodeError):
    """The path exists, with another HTTP method."""

    code, http, grpc = "method_not_allowed", 405, "UNIMPLEMENTED"


class RequestTimeout(NodeError):
    """Headers or body did not arrive in time."""

    code, http, grpc = "request_timeout", 408, "DEADLINE_EXCEEDED"


class TooLarge(NodeError):
    """The request is over the limit of 64 MiB."""

    code, http, grpc = "too_large", 413, "RESOURCE_EXHAUSTED"


class Crowded(NodeError):
    """Too many large bodies are under way at once. Over gRPC `node.door.relay` itself sends this error."""

    code, http, grpc = "crowded", 503, "RESOURCE_EXHAUSTED"

    def __init__(self, text: str = "too many large bodies are under way at once; send this again in a second") -> None:
        super().__init__(text)


class WrongMediaType(NodeError):
    """The body is not application/x-protobuf."""

    code, http, grpc = "unsupported_media_type", 415, "INVALID_ARGUMENT"


class Unsupported(NodeError):
    """This core cannot do this, or not with this configuration. The node never answers with zeros instead."""

    code, http, grpc = "unsupported", 501, "UNIMPLEMENTED"


class NotInitialized(NodeError):
    """No backend was started. Deployed controllers match this text."""

    code, http, grpc = "backend_not_initialized", 500, "UNAVAILABLE"

    def __init__(self) -> None:
        super().__init__("backend not initialized")


class NotStarted(NodeError):
    """The core is starting or being restarted; no Start is needed. Deployed controllers do not act on this text."""

    code, http, grpc = "core_not_started", 503, "UNAVAILABLE"

    def __init__(self, reason: str) -> None:
        super().__init__(f"core is not started yet: {reason}")


class CoreFailed(NodeError):
    """The core failed to start, or is down and will not be restarted; the text has its last lines."""

    code, http, grpc = "core_failed", 500, "UNAVAILABLE"


class UsersRefused(NodeError):
    """Some users could not be applied; all others were. Deployed controllers match the beginning of the text."""

    code, http, grpc = "users_refused", 500, "INTERNAL"

    # Users that the text lists, and bytes of each reason.
    LISTED = 20
    REASON = 300
    refused: Sequence[tuple[str, str]] = ()

    def __init__(self, refused: list[tuple[str, str]]) -> None:
        entries = [f"{shown(name)}: {cut(reason, self.REASON)}" for name, reason in refused[: self.LISTED]]
        while size(text := self._joined(entries, len(refused))) > MAX_TEXT:
            entries.pop()
        super().__init__(text)
        self.refused = refused

    @staticmethod
    def _joined(entries: list[str], count: int) -> str:
        rest = [f"and {count - len(entries)} more"] if count > len(entries) else []
        return "failed to update users: " + "; ".join(entries + rest)


class PortTaken(CoreFailed):
    """The core cannot bind a port of its configuration now; it may succeed later."""


class Aborted(NodeError):
    """A Stop came before the call was done."""

    code, http, grpc = "aborted", 409, "ABORTED"

    def __init__(self) -> None:
        super().__init__("aborted: the backend was stopped meanwhile")


class ShuttingDown(NodeError):
    """The node is shutting down."""

    code, http, grpc = "shutting_down", 503, "UNAVAILABLE"

    def __init__(self, text: str = "the node is shutting down") -> None:
        super().__init__(text)


KINDS: tuple[type[NodeError], ...] = (
    Internal,
    Unauthenticated,
    Forbidden,
    InvalidRequest,
    InvalidConfig,
    UnknownPath,
    UnknownName,
    WrongVerb,
    RequestTimeout,
    TooLarge,
    Crowded,
    WrongMediaType,
    Unsupported,
    NotInitialized,
    NotStarted,
    CoreFailed,
    UsersRefused,
    Aborted,
    ShuttingDown,
)
