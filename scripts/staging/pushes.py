"""A user who pushes bytes both ways all the time, and when which were pushed: to compare with what is billed."""

from __future__ import annotations

import threading
import time
from bisect import bisect
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

from scripts.staging import transfer
from scripts.staging.echo import EchoServer
from scripts.staging.wait import until

# Bytes of one echo, seconds between two of them, and seconds until an echo, or another connection, is given up.
SIZE, PAUSE, PATIENCE = 2_000, 0.01, 2.0


class Moved(NamedTuple):
    """Bytes of a user in each direction."""

    up: int = 0
    down: int = 0

    def __add__(self, other: object) -> Moved:
        assert isinstance(other, Moved)
        return Moved(self.up + other.up, self.down + other.down)

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.up - other.up, self.down - other.down)

    def __le__(self, other: object) -> bool:
        """Whether no direction has more bytes."""
        assert isinstance(other, Moved)
        return self.up <= other.up and self.down <= other.down


class Pushes:
    """Pushes through this proxy between `resume` and `pause`, on new connections when one has ended."""

    def __init__(self, proxy: int, echo: EchoServer) -> None:
        self._proxy = proxy
        self._echo = echo
        # Bytes that a core may have got from the user: more than the echo server, if it was killed just then.
        self._tried = 0
        self._before = Moved(echo.received, echo.sent)
        # When how many bytes had arrived.
        self._when: list[float] = []
        self._arrived: list[Moved] = []
        self._on, self._over, self._rests = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._push, daemon=True)

    @property
    def arrived(self) -> Moved:
        """The bytes that arrived so far."""
        return Moved(self._echo.received, self._echo.sent) - self._before

    @property
    def most(self) -> Moved:
        """The bytes that may be billed, at most."""
        return Moved(self._tried, self.arrived.down)

    def at(self, when: float) -> Moved:
        """The bytes that had arrived at this time, or somewhat fewer."""
        place = bisect(self._when, when)
        return self._arrived[place - 1] if place else Moved()

    def age(self, billed: Moved, when: float) -> float:
        """For how many seconds before this time bytes are missing, if these are billed."""
        missing = next((n for n, arrived in enumerate(self._arrived) if not arrived <= billed), len(self._when))
        return max(0.0, when - self._when[missing]) if missing < len(self._when) else 0.0

    def for_seconds(self, seconds: float) -> None:
        """Wait until bytes have arrived for so long since now."""
        began = time.monotonic()
        until(lambda: self._when and self._when[-1] > began + seconds, seconds + 20, "bytes arrive")

    def resume(self) -> None:
        self._rests.clear()
        self._on.set()

    def pause(self) -> None:
        """Return when nothing is under way."""
        self._on.clear()
        assert self._rests.wait(10), "the pushes do not end"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._on.set()
        self._thread.join()

    def _push(self) -> None:
        while not self._over.is_set():
            if not self._on.is_set():
                self._rests.set()
                self._on.wait()
            # The core, or the node with it, was killed.
            with suppress(OSError, AssertionError):
                self._use_a_connection()
            time.sleep(PAUSE)

    def _use_a_connection(self) -> None:
        self._tried += len(transfer.asking(b"hello"))
        with transfer.connect(self._proxy, self._echo, PATIENCE) as link:
            while self._on.is_set() and not self._over.is_set():
                self._tried += len(transfer.asking(bytes(SIZE)))
                transfer.small_echo(link, bytes(SIZE))
                self._when.append(time.monotonic())
                self._arrived.append(self.arrived)
                time.sleep(PAUSE)
