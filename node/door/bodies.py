"""The memory for bodies under way: one budget, whichever protocol they come by; who finds none left comes again."""

from __future__ import annotations

from dataclasses import dataclass

from node.http2 import PREFIX

# Bytes of all bodies together. What is smaller than `SMALL` costs no more than the call itself, and has a place always.
BUDGET = 256 * 1024 * 1024
SMALL = 64 * 1024
# What is longer gRPC itself refuses, before it takes it.
LARGEST = 64 * 1024 * 1024
# Seconds after which whoever found no place may come again.
AGAIN = 1.0


class Bodies:
    """What is taken of the budget."""

    def __init__(self, size: int = BUDGET) -> None:
        self._size = size
        self.taken = 0

    def take(self, count: int) -> bool:
        """Whether there is a place for so many bytes more; then they are to be given back."""
        if self.taken + count > self._size:
            return False
        self.taken += count
        return True

    def give(self, count: int) -> None:
        self.taken -= count


@dataclass
class _Stream:
    """`left` of a message that is coming in, and the bytes that it holds a place for."""

    prefix: bytes = b""
    left: int = 0
    held: int = 0


class Messages:
    """The messages of one connection's requests: each stream has a place for the last one, until it is answered.

    Strangers hold none: their calls are refused at the headers. `refused` are streams that found no place.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._streams: dict[int, _Stream] = {}
        self._counts = False
        self.refused: list[int] = []

    def data(self, stream: int, payload: memoryview) -> None:
        """More bytes of a stream that is not answered."""
        one = self._streams.setdefault(stream, _Stream())
        while payload:
            if one.left:
                size = min(one.left, len(payload))
                one.left -= size
            else:
                size = PREFIX.size - len(one.prefix)
                one.prefix += payload[:size]
                if len(one.prefix) == PREFIX.size:
                    one.left = int.from_bytes(one.prefix[1:])
                    one.prefix = b""
                    self._hold(stream, one, one.left)
            payload = payload[size:]

    def over(self, stream: int) -> None:
        """The stream is answered, or ended."""
        one = self._streams.pop(stream, None)
        if one is not None and self._counts:
            self._bodies.give(one.held)

    def count(self) -> None:
        """The key was shown: what is here counts from now on."""
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
