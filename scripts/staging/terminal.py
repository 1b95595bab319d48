"""Run a program on a pseudo-terminal and read its screen as text."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pyte

from scripts.staging.process import tied
from scripts.staging.wait import until


class Cell(NamedTuple):
    """A place of the screen: its letter, the name or the six digits of its colour, and how it is drawn."""

    letter: str
    front: str
    bold: bool
    reverse: bool


class Terminal:
    """A terminal that runs `argv` inside the `with` block. `lines` is its screen, `raw` all output."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], directory: Path, columns: int = 100, rows: int = 30
    ) -> None:
        self._argv, self._environment, self._directory = argv, {**environment, "TERM": "xterm-256color"}, directory
        self._size = columns, rows
        self._screen: Any = pyte.Screen(columns, rows)
        self._stream: Any = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.raw = b""

    def __enter__(self) -> Self:
        self._ours, theirs = pty.openpty()
        columns, rows = self._size
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._theirs = theirs
        self._process = tied(
            self._argv,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=dict(self._environment),
            cwd=self._directory,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
        os.close(self._theirs)
        self._reader.join(5)
        os.close(self._ours)

    @property
    def lines(self) -> list[str]:
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    @property
    def cells(self) -> list[list[Cell]]:
        """The screen with its colours."""
        with self._lock:
            rows = [[self._screen.buffer[y][x] for x in range(self._size[0])] for y in range(self._size[1])]
        return [[Cell(char.data, char.fg, char.bold, char.reverse) for char in row] for row in rows]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).strip()

    @property
    def modes(self) -> list[Any]:
        """The terminal's attributes (echo, line mode and others; termios(3))."""
        return termios.tcgetattr(self._theirs)

    def find(self, *words: str, timeout: float = 20.0) -> str:
        """Wait until the screen contains all of these words. Returns it."""
        try:
            until(lambda: all(word in self.text for word in words), timeout, f"{words} on the screen")
        except AssertionError as error:
            raise AssertionError(f"{error}; the screen:\n{self.text}")
        return self.text

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait(self, timeout: float = 10.0) -> int:
        """Wait for the program's exit status."""
        return self._process.wait(timeout)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # The other end is closed.
                return
            if not data:
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)
