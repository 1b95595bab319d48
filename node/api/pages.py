"""What is asked for by path alone, over REST: no operation of METHODS, and nothing that changes anything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """A status of HTTP, what the body is, and the body."""

    status: int
    media_type: bytes
    body: bytes


@dataclass(frozen=True)
class Page:
    """`answer` is given the `Accept` of the request, and whether the caller has shown a key.

    `is_open`: whoever is on this machine gets an answer without a key, too, in which nothing is told but a verdict.
    """

    path: str
    answer: Callable[[str, bool], Awaitable[Answer]]
    is_open: bool = False
