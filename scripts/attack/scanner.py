"""What a scanner without a key or a name sees of a port: ten probes, each with what it found.

`sights(port)` gives the results of all. Two ports that no scanner can distinguish have the same results; what differs
by chance, such as times, random numbers and dates, is left out. `CLOSED` is what a port shows that sends no byte.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hpack import Decoder, Encoder

from node.http2.frames import PREFACE, Kind, frame
from scripts.attack.link import blind
from scripts.staging.node import NodeProcess

CLOSED = "closed"
# What one probe found: a text or bytes for each of its attempts.
Sight = Sequence[Any]
# Seconds for a reply, and without a byte after which it counts as complete.
LONGEST, QUIET = 8.0, 0.5
_CHANCE = re.compile(rb"(?im)^date: .*\r\n")
# The program's name, and words of its texts and its interface.
_OURS = (
    "txnode",
    "twisted",
    "api key",
    "not a valid http",
    "did not arrive",
    "no such path",
    "nodeservice",
    "grpc-",
    "error",
)
_CIPHERS = (0x1301, 0x1302, 0x1303, 0xC02B, 0xC02F, 0xC02C, 0xC030, 0xCCA9, 0xCCA8, 0xC013, 0x009C, 0x002F)


class Port:
    """A port to look at, from a source address of its own: limits for addresses must not affect others."""

    def __init__(self, host: str, port: int, source: str = "127.0.0.3") -> None:
        self._address = host, port
        self._source = source, 0

    def bare(self) -> socket.socket:
        return socket.create_connection(self._address, LONGEST, self._source)

    def secure(self, name: str | None = None, *protocols: str) -> ssl.SSLSocket:
        return blind(*protocols).wrap_socket(self.bare(), server_hostname=name)

    def said(self, *parts: bytes, tls: bool = True, protocols: Sequence[str] = ("http/1.1",)) -> Any:
        """The reply to these bytes; `CLOSED` if the connection ends without one."""
        try:
            with self.secure(None, *protocols) if tls else self.bare() as link:
                for part in parts:
                    link.sendall(part)
                reply = _reply(link)
        except OSError as error:
            return _failure(error)
        return _CHANCE.sub(b"", reply) or CLOSED


def _failure(error: OSError) -> str:
    """What a failed handshake shows: an alert of the server's, or only the end."""
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return str(error.reason)
    return "silent" if isinstance(error, TimeoutError) else CLOSED


def _reply(link: socket.socket) -> bytes:
    """What comes until the end, or until silence. Raises `TimeoutError` if nothing comes at all."""
    link.settimeout(LONGEST)
    reply = link.recv(65_536)
    link.settimeout(QUIET)
    with suppress(OSError):
        while data := link.recv(65_536):
            reply += data
    return reply


def _handshake(port: Port, name: str | None, *protocols: str) -> Any:
    try:
        with port.secure(name, *protocols) as link:
            return link.getpeercert(binary_form=True), link.version(), link.cipher(), link.selected_alpn_protocol()
    except OSError as error:
        return _failure(error)


def with_a_name(port: Port) -> Sight:
    """TLS for the names that scanners try."""
    return [_handshake(port, name) for name in ("example.com", "localhost", "a" * 60 + ".internal")]


def without_a_name(port: Port) -> Sight:
    """TLS as of a scanner of addresses."""
    return [_handshake(port, None)]


def orders_of_protocols(port: Port) -> Sight:
    """ALPN in each order, and of protocols that no server speaks."""
    offers = (("h2", "http/1.1"), ("http/1.1", "h2"), ("h2",), ("http/1.1",), ("acme-tls/1", "x"), ("grpc-exp", "h2"))
    return [_handshake(port, None, *offer) for offer in offers]


def _hello(version: int, ciphers: Sequence[int], *extensions: bytes) -> bytes:
    listed = b"".join(cipher.to_bytes(2) for cipher in ciphers)
    more = b"".join(extensions)
    body = version.to_bytes(2) + bytes(range(32)) + b"\0" + len(listed).to_bytes(2) + listed + b"\x01\0"
    body += len(more).to_bytes(2) + more
    message = b"\x01" + len(body).to_bytes(3) + body
    return b"\x16\x03\x01" + len(message).to_bytes(2) + message


def _extension(kind: int, body: bytes) -> bytes:
    return struct.pack("!HH", kind, len(body)) + body


def odd_hellos(port: Port) -> Sight:
    """Hellos as JARM sends them: old versions, turned orders, GREASE; of the reply, version, cipher and extensions."""
    groups = _extension(10, b"\0\x04\0\x1d\0\x17")
    algorithms = _extension(13, b"\0\x08\x04\x03\x08\x04\x04\x01\x02\x01")
    points = _extension(11, b"\x01\0")
    hellos = (
        _hello(0x0303, _CIPHERS, groups, points, algorithms),
        _hello(0x0303, _CIPHERS[::-1], groups, points, algorithms),
        _hello(0x0303, (0x0A0A, *_CIPHERS[3:]), _extension(0x1A1A, b""), groups, points, algorithms),
        _hello(0x0302, _CIPHERS[9:], groups, points),
        _hello(0x0301, _CIPHERS[9:]),
        _hello(0x0300, (0x002F,)),
        _hello(0x0303, (0x0005,), groups, algorithms),
    )
    return [_chosen(port.said(hello, tls=False)) for hello in hellos]


def _chosen(reply: Any) -> Any:
    """The beginning of a ServerHello without its random bytes and session; an alert as it is."""
    if isinstance(reply, str) or reply[:1] != b"\x16":
        return reply
    session = 44 + reply[43]
    size = int.from_bytes(reply[3:5])
    return reply[:3], reply[9:11], reply[43], reply[session : 5 + size][:60]


def old_requests(port: Port) -> Sight:
    """HTTP/0.9 and HTTP/1.0."""
    requests = (b"GET /\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n", b"HEAD /index.html HTTP/1.0\r\nHost: example.com\r\n\r\n")
    return [port.said(request) for request in requests]


def requests(port: Port) -> Sight:
    """Pages that scanners ask for, over HTTP/1.1."""
    paths = (b"/", b"/favicon.ico", b"/.env", b"/robots.txt", b"/%ff", b"/" + b"a" * 3000)
    return [port.said(b"GET " + path + b" HTTP/1.1\r\nHost: example.com\r\n\r\n") for path in paths]


def http2(port: Port) -> Sight:
    """A page over HTTP/2, a call of gRPC, and a frame that is not allowed; frames of settings and flow are left out."""
    first = PREFACE + frame(Kind.SETTINGS, 0, 0)
    page = frame(Kind.HEADERS, 5, 1, _block((b":method", b"GET"), (b":path", b"/")))
    call = frame(Kind.HEADERS, 5, 1, _block((b":method", b"POST"), (b":path", b"/a.B/C"), (b"te", b"trailers")))
    wrong = frame(Kind.CONTINUATION, 4, 1, b"x")
    return [_frames(port.said(first + more, protocols=("h2",))) for more in (page, call, wrong)]


def _block(*fields: tuple[bytes, bytes]) -> bytes:
    return Encoder().encode([*fields, (b":scheme", b"https"), (b":authority", b"example.com")])


def _frames(reply: Any) -> Any:
    """The headers and the last words of a reply; other bytes as they are."""
    if isinstance(reply, str) or reply[3:4] != bytes([Kind.SETTINGS]):
        return reply
    found, decoder = list[Any](), Decoder()
    while len(reply) >= 9:
        size, kind = int.from_bytes(reply[:3]), reply[3]
        payload, reply = reply[9 : 9 + size], reply[9 + size :]
        if kind == Kind.HEADERS:
            found.append([field for field in decoder.decode(payload, raw=True) if field[0] != b"date"])
        elif kind in (Kind.GOAWAY, Kind.DATA):
            found.append(payload)
    return found


def odd_methods(port: Port) -> Sight:
    """Methods and lines that web servers refuse."""
    methods = (b"BREW /", b"TRACE /", b"PROPFIND /", b"get /", b"\x00\xff", b"a b")
    lines = (*(method + b" HTTP/1.1" for method in methods), b"GET")
    return [port.said(line + b"\r\nHost: example.com\r\nContent-Length: 0\r\n\r\n") for line in lines]


def without_tls(port: Port) -> Sight:
    """Other protocols than TLS, and half a hello."""
    texts = (
        b"GET / HTTP/1.1\r\n\r\n",
        b"SSH-2.0-x\r\n",
        PREFACE,
        b"\x04\x01\0\x50\x7f\0\0\x01\0",
        b"\x16\x03\x01\x02\0\x02" + bytes(511),
    )
    return [port.said(text, tls=False) for text in texts]


def refusals_in_time(port: Port) -> Sight:
    """Whether a refusal comes at once, as of a program that does not know the client, or after a while."""
    found = []
    for text, tls in ((b"x y\r\n\r\n", False), (b"GET /none HTTP/1.0\r\n\r\n", True), (b"x y z\r\n\r\n", True)):
        began = time.monotonic()
        if port.said(text, tls=tls) == CLOSED:
            found.append(CLOSED)
        else:
            found.append("at once" if time.monotonic() - began < 3 else "late")
    return found


PROBES: Mapping[str, Callable[[Port], Sight]] = {
    each.__name__: each
    for each in (
        *(with_a_name, without_a_name, orders_of_protocols, odd_hellos, old_requests, requests, http2, odd_methods),
        *(without_tls, refusals_in_time),
    )
}


def sights(port: Port) -> Mapping[str, Sight]:
    """What each probe found."""
    return {name: probe(port) for name, probe in PROBES.items()}


def marks(sight: Sight) -> list[str]:
    """What in a sight only this program sends: its name, and its texts."""
    seen = repr(sight).lower()
    return [mark for mark in _OURS if mark in seen]


def scan(node: NodeProcess) -> None:
    """Look at both ports of a node. Raises `AssertionError` if a probe shows which program it is."""
    for port in (node.rest_port, node.grpc_port):
        for name, sight in sights(Port(node.host, port)).items():
            assert not (found := marks(sight)), f"{name} shows {found} on port {port}: {sight}"
