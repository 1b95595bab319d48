"""Random mutations of bytes; the same `Random` gives the same result."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

_MOST = 8
# Boundary values of numbers and lengths, and delimiters of HTTP and protobuf.
_EDGES = (b"\0", b"\x7f", b"\x80", b"\xff", b"\xff" * 4, b"\x80" * 10, b"\r\n", b"\n", b"\r\n\r\n", b" ", b":", b",")


def mutated(data: bytes, random: Random) -> bytes:
    """The bytes with one or a few random changes."""
    for _ in range(min(_MOST, 1 + int(random.expovariate(1)))):
        data = random.choice(_CHANGES)(data, random)
    return data


def _flip(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + bytes(byte ^ 1 << random.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _insert(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice((random.choice(_EDGES), random.randbytes(random.randrange(1, 9)))) + data[at:]


def _drop(data: bytes, random: Random) -> bytes:
    begin, end = _part(data, random)
    return data[:begin] + data[end:]


def _repeat(data: bytes, random: Random) -> bytes:
    begin, end = _part(data, random)
    return data[:end] + data[begin:end] * random.choice((1, 2, 20)) + data[end:]


def _move(data: bytes, random: Random) -> bytes:
    begin, end = _part(data, random)
    left = data[:begin] + data[end:]
    at = random.randrange(len(left) + 1)
    return left[:at] + data[begin:end] + left[at:]


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _part(data: bytes, random: Random) -> tuple[int, int]:
    begin = random.randrange(len(data) + 1)
    return begin, min(len(data), begin + random.choice((1, 2, 9, 40, 400)))


_CHANGES: tuple[Callable[[bytes, Random], bytes], ...] = (_flip, _flip, _insert, _insert, _drop, _repeat, _move, _cut)


def pieces(data: bytes, random: Random) -> list[bytes]:
    """The bytes as they may arrive: whole or split at a few places."""
    places = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((0, 0, 1, 3))))
    return [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]
