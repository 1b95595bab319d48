"""Limit the speed of a child process's TCP sockets. Linux only, blocking.

It takes no capability and no queue discipline: TCP paces itself.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Mapping

from drivers.sockets.descriptors import Descriptors

# From include/uapi/asm-generic/socket.h and linux/tcp.h.
_SO_MAX_PACING_RATE, _SO_BUF_LOCK, _TCP_NOTSENT_LOWAT = 47, 72, 25
_RATE = struct.Struct("@L")
_ANY_RATE = 2 ** (8 * _RATE.size) - 1
# Bytes that a process may write ahead of the sent ones: else those written before the limit take seconds to leave.
AHEAD = 131_072
# The receive buffer of a socket without a limit: the kernel tunes the window up to it.
WIDE = 8 * 2**20
# Errors of sockets that have ended.
_ENDED = (errno.ENOTCONN, errno.EINVAL)

# Sets a limit of a socket; None removes it.
Setting = Callable[[socket.socket, int | None], None]


def pace(one: socket.socket, rate: int | None) -> None:
    """Limit sending to so many bytes a second. Connections that a listener accepts later inherit it."""
    one.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, AHEAD if rate else 0)
    one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _RATE.pack(min(rate or _ANY_RATE, _ANY_RATE)))


def narrow(one: socket.socket, window: int | None) -> None:
    """Limit the receive buffer to so many bytes, and so the window of the client."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window or WIDE)
    if window is None:
        try:
            one.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:  # Linux before 5.14: it stays as wide as that
                raise


def set_all(descriptors: Descriptors, wanted: Mapping[int, int | None], setting: Setting) -> set[int]:
    """Apply a setting to sockets of a process, by inode. Returns those set; the others do not exist any more.

    Raises `Unreachable`, and `OSError` if the kernel refuses the setting.
    """
    done = set()
    for inode, duplicate in descriptors.taken(wanted):
        if _set(duplicate, wanted[inode], setting):
            done.add(inode)
    return done


def _set(descriptor: int, value: int | None, setting: Setting) -> bool:
    """Apply a setting. Returns False if the socket has ended."""
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
