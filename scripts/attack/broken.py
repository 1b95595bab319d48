"""Connections that end at any byte and in any way: during the handshake, a request or a reply."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from random import Random

from h2.config import H2Configuration
from h2.connection import H2Connection

from node.api.methods import SERVICE
from protos.service_pb2 import Proxy, User, Users, Vless
from scripts.attack.link import bare, blind, heard, linked, reset
from scripts.attack.mutate import mutated
from scripts.staging.node import NodeProcess

_ID = "3b6d3f6a-6f1b-4b7a-9d1e-0d7f0a7c1b55"


def attack(node: NodeProcess, random: Random) -> None:
    random.choice((_handshake, _request, _request, _answer))(node, random)


def _handshake(node: NodeProcess, random: Random) -> None:
    """Send a TLS ClientHello, truncated or mutated."""
    hello = _hello(random)
    text = hello[: random.randrange(len(hello) + 1)] if random.random() < 0.5 else mutated(hello, random)
    with bare(node, _port(node, random)) as raw:
        raw.sendall(text)
        if random.random() < 0.5:
            b"".join(heard(raw))
        _leave(raw, random)


def _hello(random: Random) -> bytes:
    outgoing = ssl.MemoryBIO()
    shaking = blind(random.choice(("h2", "http/1.1"))).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        shaking.do_handshake()
    return outgoing.read()


def _request(node: NodeProcess, random: Random) -> None:
    text = random.choice(_REQUESTS)(node.key)
    with linked(node, _port(node, random), "h2", "http/1.1") as link, suppress(OSError):
        link.sendall(text[: random.randrange(len(text) + 1)])
        _leave(link, random)


def _answer(node: NodeProcess, random: Random) -> None:
    """Send a whole request and read a part of the reply."""
    with linked(node, _port(node, random), "h2", "http/1.1") as link, suppress(OSError):
        link.sendall(random.choice(_REQUESTS)(node.key))
        for _ in range(random.randrange(4)):
            link.recv(random.choice((1, 10, 200)))
        _leave(link, random)


def _leave(link: socket.socket, random: Random) -> None:
    """End the connection: TLS close, TCP reset, half-close or TCP close."""
    with suppress(OSError):
        match random.randrange(4):
            case 0 if isinstance(link, ssl.SSLSocket):
                link.settimeout(0.1)
                link.unwrap()
            case 1:
                reset(link)
            case 2:
                link.shutdown(socket.SHUT_WR)
                b"".join(heard(link))
            case _:
                link.close()


def _port(node: NodeProcess, random: Random) -> int:
    return random.choice((node.rest_port, node.grpc_port))


def _users() -> bytes:
    proxies = Proxy(vless=Vless(id=_ID))
    return Users(
        users=[User(email=f"{n}.cut", proxies=proxies, inbounds=["in-0"]) for n in range(30)]
    ).SerializeToString()


def _rest(verb: str, path: str, content: bytes = b"") -> Callable[[str], bytes]:
    head = f"{verb} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nAuthorization: Bearer "
    return lambda key: f"{head}{key}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def _chunked(key: str) -> bytes:
    head, content = _rest("PUT", "/users/sync")(key).decode(), _users()
    text = head.replace("Content-Length: 0", "Transfer-Encoding: chunked").encode()
    parts = [content[at : at + 100] for at in range(0, len(content), 100)]
    return text + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def _grpc(name: str, *contents: bytes) -> Callable[[str], bytes]:
    def text(key: str) -> bytes:
        client = H2Connection(H2Configuration(header_encoding=None))
        client.initiate_connection()
        headers = {":method": "POST", ":scheme": "https", ":path": f"/{SERVICE.full_name}/{name}", ":authority": "x"}
        more = {"te": "trailers", "content-type": "application/grpc", "x-api-key": key}
        client.send_headers(1, [*headers.items(), *more.items()])
        for content in contents:
            client.send_data(1, b"\0" + len(content).to_bytes(4) + content)
        client.end_stream(1)
        return client.data_to_send()

    return text


_USER = User(email="cut", proxies=Proxy(vless=Vless(id=_ID)), inbounds=["in-0"]).SerializeToString()
# StatRequest: all users, with `reset`.
_RESET = b"\x10\x01\x18\x04"
_REQUESTS = (
    _rest("GET", "/info"),
    _rest("GET", "/logs"),
    _rest("GET", "/stats", _RESET),
    _rest("PUT", "/users/sync", _users()),
    _chunked,
    _grpc("GetBaseInfo", b""),
    _grpc("GetLogs", b""),
    _grpc("GetStats", _RESET),
    _grpc("SyncUser", *[_USER] * 20),
    _grpc("SyncUsers", _users()),
)
