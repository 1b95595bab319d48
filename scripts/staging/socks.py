"""SOCKS5 client (RFC 1928) without authentication: TCP connections and UDP associations through a client core."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable
from types import TracebackType
from typing import Self

_TIMEOUT = 10.0
_CONNECT, _ASSOCIATE = 1, 3
_IPV4, _NAME, _IPV6 = 1, 3, 4
# Ports of `hurry`; `free_port` gives none of them to another program.
_hurried: set[int] = set()


class SocksError(OSError):
    """The SOCKS server refused, or does not speak SOCKS5."""


def connect(socks_port: int, host: str, port: int, timeout: float = _TIMEOUT, *, first: bytes = b"") -> socket.socket:
    """A TCP connection to `host` (an address, or a name that the far end resolves) through the SOCKS port.

    The core confirms before it has reached the far end: only a reply from there proves the connection. Reads and writes
    on the socket time out after `timeout` seconds.

    `first` is sent at once: to an Xray (see `hurry`) with the request, to others after the reply.
    """
    if socks_port in _hurried or not first:
        return _open(socks_port, _CONNECT, host, port, timeout, first)[0]
    link = _open(socks_port, _CONNECT, host, port, timeout)[0]
    try:
        link.sendall(first)
    except BaseException:
        link.close()
        raise
    return link


def hurry(ports: Iterable[int]) -> None:
    """Send the first bytes of connections through these ports, which are Xray's, with the request.

    Xray's client (26.3.27) waits 100 ms for a connection's first bytes, and then sends an empty chunk, which VMess and
    Shadowsocks (before 2022) take for the end of the upload. So bytes that are sent after the reply come too late if
    this process gets no processor for so long. sing-box would lose bytes that come with the request.
    """
    _hurried.update(ports)


class UdpAssociation:
    """Sends and receives datagrams through the SOCKS port, inside its `with` block."""

    def __init__(self, socks_port: int, timeout: float = _TIMEOUT) -> None:
        self._control, relay = _open(socks_port, _ASSOCIATE, "0.0.0.0", 0, timeout)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.settimeout(timeout)
        self._socket.connect(relay)

    def send(self, data: bytes, host: str, port: int) -> None:
        self._socket.send(b"\0\0\0" + _address(host, port) + data)

    def receive(self) -> bytes:
        """The next datagram's payload. Raises `TimeoutError`."""
        packet = self._socket.recv(65_535)
        return packet[3 + _address_size(packet[3:]) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._control.close()


def _open(
    socks_port: int, command: int, host: str, port: int, timeout: float, first: bytes = b""
) -> tuple[socket.socket, tuple[str, int]]:
    """The connection, and the address in the server's reply."""
    link = socket.create_connection(("127.0.0.1", socks_port), timeout)
    try:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(b"\5\1\0")
        if exactly(link, 2) != b"\5\0":
            raise SocksError("the server demands authentication, or is no SOCKS5 server")
        link.sendall(bytes((5, command, 0)) + _address(host, port) + first)
        return link, _reply(link)
    except OSError:
        link.close()
        raise


def _reply(link: socket.socket) -> tuple[str, int]:
    _, status, _, kind = exactly(link, 4)
    if status or kind not in (_IPV4, _IPV6):
        raise SocksError(f"the server replied with status {status}, address type {kind}")
    packed = exactly(link, 4 if kind == _IPV4 else 16)
    return str(ipaddress.ip_address(packed)), int.from_bytes(exactly(link, 2))


def _address(host: str, port: int) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.encode()
        return bytes((_NAME, len(name))) + name + struct.pack("!H", port)
    return bytes((_IPV4 if address.version == 4 else _IPV6,)) + address.packed + struct.pack("!H", port)


def _address_size(packet: bytes) -> int:
    host = {_IPV4: 4, _IPV6: 16, _NAME: 1 + packet[1]}[packet[0]]
    return 1 + host + 2


def exactly(link: socket.socket, size: int) -> bytes:
    """Read so many bytes. Raises `SocksError` if the connection ends before."""
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise SocksError("the server closed the connection")
        data += more
    return data
