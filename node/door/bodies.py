"""The memory budget for request bodies under way, shared by both protocols; over it, clients must retry later."""

from __future__ import annotations

from node.http2.frames import Messages

# Bytes of all bodies together. A body smaller than `SMALL` costs no more than the call itself, and is not counted.
BUDGET = 256 * 1024 * 1024
SMALL = 64 * 1024
# gRPC's server itself refuses longer messages, before it reads them.
LARGEST = 64 * 1024 * 1024
# Seconds after which a refused client may retry.
AGAIN = 1.0


class Bodies:
    """The budget, and the bytes of it in use."""

    def __init__(self, size: int = BUDGET) -> None:
        self._size = size
        self.taken = 0

    def take(self, count: int) -> bool:
        """Reserve this many bytes, to be released by `give`. Returns False if there are not as many left."""
        if self.taken + count > self._size:
            return False
        self.taken += count
        return True

    def give(self, count: int) -> None:
        self.taken -= count


class _Stream(Messages):
    """One stream, and the bytes reserved for its current message."""

    held = 0


class Requests:
    """Reserves memory for the requests of one connection: for each stream's last message, until the stream is answered.

    Nothing is reserved for clients that have not shown a key: their calls are refused at the headers. `refused` are the
    streams for which the budget had no room.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._streams: dict[int, _Stream] = {}
        self._counts = False
        self.refused: list[int] = []

    def data(self, stream: int, payload: memoryview) -> None:
        """Take the next bytes of an unanswered stream."""
        one = self._streams.setdefault(stream, _Stream())
        for found in one.split(payload):
            if isinstance(found, int):
                self._hold(stream, one, found)

    def over(self, stream: int) -> None:
        """The stream is answered, or ended."""
        one = self._streams.pop(stream, None)
        if one is not None and self._counts:
            self._bodies.give(one.held)

    def count(self) -> None:
        """The client has shown a key: reserve memory from here on, also for what has come already."""
        self._counts = True
        for stream, one in self._streams.items():
            held, one.held = one.held, 0
            self._hold(stream, one, held)

    def close(self) -> None:
        for stream in tuple(self._streams):
            self.over(stream)

    def _hold(self, stream: int, one: _Stream, size: int) -> None:
        wanted = size if SMALL <= size <= LARGEST else 0
        if self._counts:
            self._bodies.give(one.held)
            one.held = 0
            if not self._bodies.take(wanted):
                self.refused.append(stream)
                return
        one.held = wanted
