"""Holds TCP sockets of a child process to a speed. Linux only, blocking.

It takes no capability, and no queue discipline: TCP paces itself.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Mapping

from drivers.sockets.descriptors import Descriptors

# Of include/uapi/asm-generic/socket.h and linux/tcp.h.
_SO_MAX_PACING_RATE, _SO_BUF_LOCK, _TCP_NOTSENT_LOWAT = 47, 72, 25
_RATE = struct.Struct("@L")
_ANY_RATE = 2 ** (8 * _RATE.size) - 1
# Bytes that a process may write ahead of what is sent: else what it has written by then takes seconds to get out.
AHEAD = 131_072
# Bytes that a client may have under way at most; the kernel goes up to that by itself again.
WIDE = 8 * 2**20
# What is said of sockets that have ended.
_ENDED = (errno.ENOTCONN, errno.EINVAL)

# What is done to a socket, by the value that it is to have; None takes away.
Setting = Callable[[socket.socket, int | None], None]


def pace(one: socket.socket, rate: int | None) -> None:
    """Have it send at most so many bytes a second. What a listener accepts from then on has the same."""
    one.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, AHEAD if rate else 0)
    one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _RATE.pack(min(rate or _ANY_RATE, _ANY_RATE)))


def narrow(one: socket.socket, window: int | None) -> None:
    """Have it take at most so many bytes at once."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window or WIDE)
    if window is None:
        try:
            one.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:  # Linux before 5.14: it stays as wide as that
                raise


def set_all(descriptors: Descriptors, wanted: Mapping[int, int | None], setting: Setting) -> set[int]:
    """Have sockets of a process, by inode, be so. Returns which are; others it has not, or no more.

    Raises `Unreachable`, and `OSError` if the kernel refuses it.
    """
    done = set()
    for inode, duplicate in descriptors.taken(wanted):
        if _set(duplicate, wanted[inode], setting):
            done.add(inode)
    return done


def _set(descriptor: int, value: int | None, setting: Setting) -> bool:
    """Whether it is so now."""
    one = socket.socket(fileno=descriptor)
    try:
        setting(one, value)
    except OSError as error:
        if error.errno not in _ENDED:
            raise
        return False
    finally:
        one.detach()
    return True
