"""The one way to wait in a test: for a condition, with a deadline."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_INTERVAL = 0.01


def until(condition: Callable[[], T], timeout: float = 10.0, what: str = "a condition") -> T:
    """Ask `condition` until it answers something true, and return that.

    An exception counts as "not yet". Raises `AssertionError` after `timeout` seconds, with `what`, the last answer and
    the last exception as its cause.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer, error = _ask(condition)
        if answer:
            return answer
        if time.monotonic() >= deadline:
            last = f"{type(error).__name__}: {error}" if error else repr(answer)
            raise AssertionError(f"{what}: not within {timeout:g} s (last: {last})") from error
        time.sleep(_INTERVAL)


def _ask(condition: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return condition(), None
    except Exception as error:  # noqa: BLE001 - reported by the caller at the deadline
        return None, error


def accepts(port: int, host: str = "127.0.0.1") -> bool:
    """Somebody accepts TCP connections there."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def bound(port: int) -> bool:
    """Somebody has the UDP port. Looked up, not tried: a try could be in the way of who wants it."""
    tables = (Path("/proc/net/udp"), Path("/proc/net/udp6"))
    rows = [row for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return any(row.split()[1].endswith(f":{port:04X}") for row in rows)
