"""Pages of REST beside METHODS, such as metrics and readiness: read-only, selected by path alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """A response: HTTP status, media type and body."""

    status: int
    media_type: bytes
    body: bytes


@dataclass(frozen=True)
class Page:
    """A page. `answer` is called with the `Accept` of the request, and whether the caller has a key.

    `is_open`: clients on this machine get an answer without a key, too, which has only the verdict.
    """

    path: str
    answer: Callable[[str, bool], Awaitable[Answer]]
    is_open: bool = False
