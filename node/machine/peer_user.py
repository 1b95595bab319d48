"""Looks up the user that owns the other end of a TCP connection on this machine (sock_diag(7))."""

from __future__ import annotations

import socket
import struct
import sys

# include/uapi/linux/{netlink,sock_diag,inet_diag}.h
_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2
_HEADER = struct.Struct("=IHHII")
# Family, protocol, no extensions, padding, all states; ports and addresses, own and other; any interface and cookie.
_ASK = struct.Struct("=BBBxI2s2s16s16sIQ")
_ANY = 0xFFFF_FFFF_FFFF_FFFF
# Offsets in the reply of its type, the user id and the socket's inode.
_KIND, _USER, _INODE = 4, 80, 84
Address = tuple[str, int]


def user_of(theirs: Address, ours: Address) -> int | None:
    """Return the user id of the socket at `theirs` that is connected to `ours`. IPv4 only.

    None if the kernel does not say, or the socket is closed. Raises `OSError`.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1)
        body = _ASK.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFF_FFFF, *_packed(theirs, ours), 0, _ANY)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 1, 0) + body)
        answer = kernel.recv(4096)
    if len(answer) < _INODE + 4 or int.from_bytes(answer[_KIND : _KIND + 2], sys.byteorder) == _ERROR:
        return None
    user, inode = (int.from_bytes(answer[place : place + 4], sys.byteorder) for place in (_USER, _INODE))
    # Older kernels report user 0 for a socket that its process has closed.
    return user if inode else None


def _packed(theirs: Address, ours: Address) -> tuple[bytes, bytes, bytes, bytes]:
    own, other = (socket.inet_aton(host).ljust(16, b"\0") for host, _ in (theirs, ours))
    return theirs[1].to_bytes(2), ours[1].to_bytes(2), own, other
