"""Hide another process's UDP socket from clients, and show it again; the process notices nothing. Linux only, blocking.

A hidden socket is bound to an interface that does not exist, so it receives nothing. If no other socket is at its
address the kernel answers clients with ICMP port unreachable. It takes no capability. connect(2) would also hide it,
but an IPv6 socket does not fully recover from that.
"""

from __future__ import annotations

import ctypes
import os
import socket

from drivers.sockets.reuseport import SO_BINDTOIFINDEX

# A hidden socket's interface is this number less its former one, from which the next node process restores it.
_NO_INTERFACE, _INTERFACES = 0x7FFFFFFF, 0x40000000
# A socket address of no family.
_NO_ADDRESS = bytes(16)
_LIBC = ctypes.CDLL(None, use_errno=True)


def hide(one: socket.socket) -> None:
    """Hide a socket. It also leaves its SO_REUSEPORT group, as it changes its place in the kernel. Raises `OSError`."""
    if is_hidden(one):
        return
    if interface := one.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX):
        # Without a capability only a socket bound to no interface can be bound to one.
        disconnect(one.fileno())
    one.setsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX, _NO_INTERFACE - interface)


def show(one: socket.socket, interface: int) -> None:
    """Show a socket again, in no group, bound to its former `interface`. Raises `OSError`."""
    disconnect(one.fileno())
    one.setsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX, interface)


def is_hidden(one: socket.socket) -> bool:
    return one.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX) > _INTERFACES


def disconnect(descriptor: int) -> None:
    """Connect to AF_UNSPEC: this resets a TCP connection, and unbinds a UDP socket from its interface.

    See tcp_disconnect in net/ipv4/tcp.c and __udp_disconnect in net/ipv4/udp.c of the kernel. Raises `OSError`.
    """
    if _LIBC.connect(descriptor, _NO_ADDRESS, len(_NO_ADDRESS)):
        fault = ctypes.get_errno()
        raise OSError(fault, os.strerror(fault))
