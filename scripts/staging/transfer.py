"""A user's transfers over a connection to the echo server: each function checks every byte that comes back.

They raise `OSError` if the connection ends early, `TimeoutError` if it stalls, and `AssertionError` for wrong bytes.
"""

from __future__ import annotations

import socket
import threading

from scripts.staging import socks
from scripts.staging.acceptor import wake
from scripts.staging.echo import BLOCK, TAKEN, EchoServer, given
from scripts.staging.socks import UdpAssociation

_HELLO = b"hello"


def connect(socks_port: int, server: EchoServer, timeout: float = 10.0) -> socket.socket:
    """A connection to the echo server through the SOCKS port, after a first small echo.

    Small, because a Trojan client of Xray 26.3.27 drops a connection whose first payload is over 8 kB
    ("buffer is full"). An echo, because a SOCKS server confirms before it has reached the far end. It is sent with the
    request where it must not be late: see `socks.hurry`.
    """
    link = socks.connect(socks_port, server.host, server.port, timeout, first=asking(_HELLO))
    try:
        receive_echo(link, _HELLO)
    except BaseException:
        link.close()
        raise
    return link


def echo(link: socket.socket, payload: bytes) -> None:
    """Send the payload and receive its echo at the same time."""
    sender = threading.Thread(target=_send, args=(link, asking(payload)), daemon=True)
    sender.start()
    returned = _receive(link, len(payload))
    sender.join()
    assert returned == payload, "the echo is not what was sent"


def small_echo(link: socket.socket, payload: bytes) -> None:
    """Send the payload, then receive its echo: for payloads that fit into the buffers on the way."""
    link.sendall(asking(payload))
    receive_echo(link, payload)


def asking(payload: bytes) -> bytes:
    """What is sent for an echo of the payload."""
    return b"echo %d\n" % len(payload) + payload


def receive_echo(link: socket.socket, payload: bytes) -> None:
    """Receive the echo of a payload that has been sent, or is being sent."""
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
    """Send one datagram and receive its echo; UDP may lose it, so up to three attempts."""
    for _ in range(3):
        association.send(payload, server.host, server.port)
        try:
            returned = association.receive()
        except TimeoutError:
            continue
        assert returned == payload, "the datagram is not what was sent"
        return
    raise TimeoutError("no echo of three datagrams came back")


def _send_all(link: socket.socket, size: int) -> None:
    block = bytes(BLOCK)
    for start in range(0, size, BLOCK):
        link.sendall(block[: size - start])


def _send(link: socket.socket, data: bytes) -> None:
    """Send in a thread; on failure, shut the connection down, so that the receiver raises."""
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
