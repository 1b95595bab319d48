"""Log lines of the core to two readers over gRPC: how many arrive, how late, and the node's processor time.

The bench writes them into the pipe of the core's output, each with the time at which it was due.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from scripts.bench.arena import Arena, row
from scripts.bench.raw import arrived, log_stream, payloads
from scripts.bench.results import Row
from scripts.bench.sides import Side, medians

RATE, SECONDS, READERS = 10_000, 2, 2
# Batches of lines a second. A batch is one write, so it must fit into the size that a pipe accepts atomically.
_PORTIONS = 500
_LINE = "2026/11/22 12:00:00.000000 from tcp:203.0.113.7:51234 accepted tcp:a.example:443 [in >> direct] email: 7.user"
_DUE = re.compile(rb" due=(\d+\.\d{6})")
# Seconds for the readers to connect before the first line, and for the last lines to arrive.
_MOMENT = 1.0


def line_rows(among: Arena) -> Iterator[Row]:
    found = medians(among.sides("grpc"), among.rounds, partial(_lines, SECONDS))
    yield row("log lines, delivered to each reader", "%", found, 0)
    yield row("log lines, p50 lateness", "ms", found, 1)
    yield row("log lines, CPU", "us", found, 2)


class Reader:
    """Collects a log stream's bytes and their times of arrival."""

    def __init__(self, link: ssl.SSLSocket) -> None:
        self._link, self._pieces, self._arrivals, self._size = link, list[bytes](), list[tuple[int, float]](), 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shut down and wait for the thread: it could read from the next socket with the same descriptor."""
        self._link.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def lateness(self, since: float) -> list[float]:
        """Lateness in seconds of each line due after `since`: a node may begin with older lines."""
        data, ends, places = payloads(b"".join(self._pieces))
        found = ((match.end(), float(match[1])) for match in _DUE.finditer(data))
        return [arrived(place, ends, places, self._arrivals) - due for place, due in found if due >= since]

    def _read(self) -> None:
        try:
            while piece := self._link.recv(65_536):
                self._size += len(piece)
                self._pieces.append(piece)
                self._arrivals.append((self._size, time.monotonic()))
        except OSError:
            return  # `close` has shut it down.


@contextmanager
def listening(side: Side) -> Iterator[Reader]:
    with log_stream(side.target.grpc_port, side.target.pem, side.headers) as link:
        reader = Reader(link)
        try:
            yield reader
        finally:
            reader.close()


def _lines(seconds: float, side: Side) -> tuple[float, float, float]:
    """Percent of lines received by a reader, median lateness in ms, microseconds of processor time a line."""
    portions = int(seconds * _PORTIONS)
    with ExitStack() as stack:
        readers = [stack.enter_context(listening(side)) for _ in range(READERS)]
        time.sleep(_MOMENT)
        used, begun = side.used, time.monotonic()
        writer = multiprocessing.get_context("spawn").Process(target=_write, args=(side.log, portions), daemon=True)
        writer.start()
        writer.join()
        time.sleep(_MOMENT)
        processor = side.used - used
        late = [seconds for reader in readers for seconds in reader.lateness(begun)]
    made = portions * RATE // _PORTIONS
    middle = statistics.median(late) if late else float("nan")
    return 100 * len(late) / READERS / made, 1e3 * middle, 1e6 * processor / made


def _write(path: str, portions: int) -> None:
    pipe, begun = os.open(path, os.O_WRONLY), time.monotonic()
    for number in range(portions):
        due = begun + number / _PORTIONS
        time.sleep(max(0.0, due - time.monotonic()))
        os.write(pipe, f"{_LINE} due={due:.6f}\n".encode() * (RATE // _PORTIONS))
