"""Pages and buttons of REST beside METHODS, selected by path: pages are read-only, as metrics and readiness."""

from __future__ import annotations

import json
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


@dataclass(frozen=True)
class Button:
    """What a POST with a key of scope all does. `press` is called with the body."""

    path: str
    press: Callable[[bytes], Awaitable[Answer]]


def answer(status: int, detail: str) -> Answer:
    """An answer in JSON with its text as `detail`, where deployed panels look for it."""
    return Answer(status, b"application/json", json.dumps({"detail": detail}).encode())
