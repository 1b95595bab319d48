"""What a user does with a connection to the echo server: each checks every byte that comes back.

All raise `OSError` when the connection ends early, `TimeoutError` when it stalls, and `AssertionError` for wrong bytes.
"""

from __future__ import annotations

import socket
import threading

from scripts.staging import socks
from scripts.staging.acceptor import wake
from scripts.staging.echo import BLOCK, TAKEN, EchoServer, given
from scripts.staging.socks import UdpAssociation


def connect(socks_port: int, server: EchoServer, timeout: float = 10.0) -> socket.socket:
    """A connection to the echo server through the SOCKS port, on which a first small echo went there and back.

    Small, because a Trojan client of Xray 26.3.27 drops a connection whose first payload is over 8 kB
    ("buffer is full"); and because a SOCKS server's yes does not yet mean that the way is open.
    """
    link = socks.connect(socks_port, server.host, server.port, timeout)
    try:
        echo(link, b"hello")
    except BaseException:
        link.close()
        raise
    return link


def echo(link: socket.socket, payload: bytes) -> None:
    """Send the payload and receive it again, both at once."""
    sender = threading.Thread(target=_send, args=(link, b"echo %d\n" % len(payload) + payload), daemon=True)
    sender.start()
    returned = _receive(link, len(payload))
    sender.join()
    assert returned == payload, "the echo is not what was sent"


def small_echo(link: socket.socket, payload: bytes) -> None:
    """The same for a payload that fits into the buffers on its way: one after the other."""
    link.sendall(b"echo %d\n" % len(payload) + payload)
    assert _receive(link, len(payload)) == payload, "the echo is not what was sent"


def download(link: socket.socket, size: int) -> None:
    """Receive `size` bytes."""
    link.sendall(b"give %d\n" % size)
    assert _receive(link, size) == given(size), "the download is not what the server gives"


def upload(link: socket.socket, size: int) -> None:
    """Send `size` bytes and wait until the server has them all."""
    link.sendall(b"take %d\n" % size)
    _send_all(link, size)
    assert _receive(link, len(TAKEN)) == TAKEN, "the server does not confirm the upload"


def udp_echo(association: UdpAssociation, payload: bytes, server: EchoServer) -> None:
    """Send one datagram and receive it again; it is sent again when it was lost, as UDP may."""
    for _ in range(3):
        association.send(payload, server.host, server.port)
        try:
            returned = association.receive()
        except TimeoutError:
            continue
        assert returned == payload, "the datagram is not what was sent"
        return
    raise TimeoutError("no datagram comes back")


def _send_all(link: socket.socket, size: int) -> None:
    block = bytes(BLOCK)
    for start in range(0, size, BLOCK):
        link.sendall(block[: size - start])


def _send(link: socket.socket, data: bytes) -> None:
    """In a thread: a connection that fails here fails for the receiver as well, who tells."""
    try:
        link.sendall(data)
    except OSError:
        wake(link)


def _receive(link: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        read = link.recv_into(view[filled:])
        if not read:
            raise ConnectionResetError(f"the connection ended {size - filled} of {size} bytes early")
        filled += read
    return bytes(data)
