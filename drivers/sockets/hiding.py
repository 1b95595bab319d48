"""Takes a UDP socket from where clients find it, and puts it back; its process notices nothing. Linux only, blocking.

Hidden, it is bound to an interface that does not exist, so nothing comes to it. Where nobody else is at its address
the kernel tells clients so (ICMP: port unreachable). It takes no capability. Not by connect(2): an IPv6 socket never
gets back all of what that takes from it.
"""

from __future__ import annotations

import ctypes
import os
import socket

from drivers.sockets.reuseport import SO_BINDTOIFINDEX

# Less the one that it was bound to: another node is to know that.
_NO_INTERFACE, _INTERFACES = 0x7FFFFFFF, 0x40000000
# A socket address of no family.
_NO_ADDRESS = bytes(16)
_LIBC = ctypes.CDLL(None, use_errno=True)


def hide(one: socket.socket) -> None:
    """It leaves its group (SO_REUSEPORT), too, since it changes its place in the kernel. Raises `OSError`."""
    if is_hidden(one):
        return
    if interface := interface_of(one):
        # Only who is bound to none may choose one without a capability.
        disconnect(one.fileno())
    one.setsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX, _NO_INTERFACE - interface)


def show(one: socket.socket, interface: int) -> None:
    """It is at its address again, and in no group. `interface` is the one that it was bound to. Raises `OSError`."""
    disconnect(one.fileno())
    one.setsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX, interface)


def is_hidden(one: socket.socket) -> bool:
    return one.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX) > _INTERFACES


def interface_of(one: socket.socket) -> int:
    """The interface that it is bound to, or was before it was hidden; 0 for none."""
    interface = one.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX)
    return _NO_INTERFACE - interface if interface > _INTERFACES else interface


def disconnect(descriptor: int) -> None:
    """Connect to no address: it ends a TCP connection by a reset, and unbinds a UDP socket from its interface.

    Of the kernel's net/ipv4/: tcp_disconnect in tcp.c, __udp_disconnect in udp.c. Raises `OSError`.
    """
    if _LIBC.connect(descriptor, _NO_ADDRESS, len(_NO_ADDRESS)):
        fault = ctypes.get_errno()
        raise OSError(fault, os.strerror(fault))
