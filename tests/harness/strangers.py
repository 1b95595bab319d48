"""Clients without the key that connect to a port of the node, in bulk or with bad behaviour."""

from __future__ import annotations

import os
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, StreamEnded, StreamReset
from h2.exceptions import ProtocolError

from scripts.staging.process import Child

# Rounds of ten bare connections and a TLS handshake, with a line of output for each round and each failed handshake.
_KNOCK = """\
import socket, ssl, sys

address = "127.0.0.1", int(sys.argv[1])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
while True:
    print("a round", flush=True)
    shaken = False
    for number in range(11):
        try:
            with socket.create_connection(address, 5) as link:
                if number == 10:
                    context.wrap_socket(link).close()
                    shaken = True
        except OSError:
            pass
    if not shaken:
        print("no hands were shaken", flush=True)
"""


def nobody(_: Sequence[str], __: Sequence[str]) -> bool:
    """Accept no key."""
    return False


@contextmanager
def knocking(port: int, processes: int = 2) -> Iterator[Callable[[], int]]:
    """Processes that connect to the port repeatedly inside the block, and send nothing or only a handshake.

    Yields a function that returns the number of rounds of the slowest. Raises `AssertionError` if a handshake failed.
    """
    with ExitStack() as stack:
        argv = [sys.executable, "-ISc", _KNOCK, str(port)]
        children = [stack.enter_context(Child(argv, {"PATH": os.defpath})) for _ in range(processes)]
        yield lambda: min(len(child.lines) for child in children)
        assert not [line for child in children for line in child.lines if line != "a round"]


# Silent connections, and TLS connections with a byte now and then, to each port. Prints when all are being opened, and
# when all have ended.
_LINGER = """\
import asyncio, ssl, sys

context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2", "http/1.1"])
number, *ports = map(int, sys.argv[1:])

async def slow(port, text):
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    for byte in text:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.5)

async def silent(port):
    reader, _ = await asyncio.open_connection("127.0.0.1", port)
    await reader.read()

async def main():
    texts = [b"GET / HTTP/1.1\\r\\n" + b"x" * 100, b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + b"x" * 100]
    all = [silent(port) for port in ports for _ in range(number)]
    all += [slow(port, text) for port, text in zip(ports, texts) for _ in range(number)]
    gone = asyncio.gather(*all, return_exceptions=True)
    await asyncio.sleep(0)
    print("there", flush=True)
    await gone
    print("gone", flush=True)

asyncio.run(main())
"""


@contextmanager
def lingering(number: int, rest_port: int, grpc_port: int) -> Iterator[Callable[[], bool]]:
    """A process with so many silent and as many slow connections to each port. Yields whether all are gone."""
    argv = [sys.executable, "-ISc", _LINGER, str(number), str(rest_port), str(grpc_port)]
    with Child(argv, {"PATH": os.defpath}) as child:
        child.ready(lambda: child.lines, 10, "the strangers connect")
        yield lambda: "gone" in child.lines


def blind() -> ssl.SSLContext:
    """A client's context that accepts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


def call(port: int, path: bytes, *more: tuple[bytes, bytes]) -> bool:
    """Make one gRPC call without a key, of any path and with any headers, and read the reply to its end.

    Returns whether there was one: the node ends a connection that it does not pass on.
    """
    configuration = H2Configuration(header_encoding=None, validate_outbound_headers=False)
    connection = H2Connection(configuration)
    connection.initiate_connection()
    names = (b":method", b":scheme", b":path", b":authority", b"te", b"content-type")
    values = (b"POST", b"https", path, b"node", b"trailers", b"application/grpc")
    connection.send_headers(1, [*zip(names, values, strict=True), *more], end_stream=True)
    with socket.create_connection(("127.0.0.1", port), 5) as raw, blind().wrap_socket(raw) as link:
        link.sendall(connection.data_to_send())
        # h2 accepts no frames after the node's GOAWAY.
        with suppress(ProtocolError):
            while data := link.recv(65_536):
                if any(map(_ends, connection.receive_data(data))):
                    return True
                link.sendall(connection.data_to_send())
    return False


def _ends(event: Event) -> bool:
    return isinstance(event, StreamEnded | StreamReset)
