"""Wait in a test for a condition, with a deadline."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Seconds between two looks: at first, in the end, and what share of the time that has passed in between. Conditions ask
# nodes and look through processes, which costs both sides more than the tests themselves.
_SHORT, _LONG, _SHARE = 0.01, 0.06, 0.03


def until(condition: Callable[[], T], timeout: float = 10.0, what: str = "a condition") -> T:
    """Call `condition` until it returns something true, and return that.

    An exception counts as "not yet". After `timeout` seconds raises `AssertionError` with `what` and the last result
    or exception; the exception is also its cause.
    """
    began = time.monotonic()
    while True:
        answer, error = _ask(condition)
        if answer:
            return answer
        passed = time.monotonic() - began
        if passed >= timeout:
            last = f"{type(error).__name__}: {error}" if error else repr(answer)
            raise AssertionError(f"{what}: not within {timeout:g} s (last: {last})") from error
        time.sleep(min(_LONG, max(_SHORT, passed * _SHARE)))


def _ask(condition: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return condition(), None
    except Exception as error:  # noqa: BLE001 - reported by the caller at the deadline
        return None, error


def accepts(port: int, host: str = "127.0.0.1") -> bool:
    """Whether the port accepts TCP connections."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def bound(port: int) -> bool:
    """Whether the UDP port is bound. Read from /proc: a trial bind could be in the way of the process that wants it."""
    tables = (Path("/proc/net/udp"), Path("/proc/net/udp6"))
    rows = [row for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return any(row.split()[1].endswith(f":{port:04X}") for row in rows)
