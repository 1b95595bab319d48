"""HTTP/2 fuzzer: almost valid calls that the h2 library encodes, whole or mutated, and frames made by hand."""

from __future__ import annotations

from contextlib import suppress
from random import Random

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import Event, ResponseReceived, TrailersReceived
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from node.api.methods import METHODS, SERVICE
from scripts.attack.link import linked, talk
from scripts.attack.messages import body
from scripts.attack.mutate import mutated, pieces
from scripts.staging.node import NodeProcess

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PATHS = (b"", b"/", b"*", b"/a/b/c", b"/grpc.health.v1.Health/Watch", b"/" + b"x" * 9000, "/é".encode())
_HEADERS = (
    (b"te", b"x"),
    (b"content-type", b"text/html"),
    (b"content-type", b"application/grpc+json"),
    (b"grpc-timeout", b"0n"),
    (b"grpc-timeout", b"1n"),
    (b"grpc-timeout", b"99999999999S"),
    (b"grpc-timeout", b"-1S"),
    (b"grpc-encoding", b"gzip"),
    (b"grpc-encoding", b"\xff"),
    (b"grpc-accept-encoding", b"," * 500),
    (b"grpc-tags-bin", b"!"),
    (b"x-bin", b"\xff"),
    (b"x-api-key", b"\xff"),
    (b"authorization", b"Bearer"),
    (b"content-length", b"-1"),
    (b"content-length", b"5"),
    (b"connection", b"close"),
    (b"transfer-encoding", b"chunked"),
    (b"host", b"other"),
    (b":path", b"/again"),
    (b":status", b"200"),
    (b"UPPER", b"case"),
    (b"", b""),
    (b"a\r\nb", b"c\r\nd"),
    (b"x", b"y" * 7000),
    (b"x", b"y" * 15_000),
)
_LOOSE = H2Configuration(header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False)


def attack(node: NodeProcess, random: Random) -> None:
    """One connection with several calls."""
    client = H2Connection(_LOOSE)
    text = calls(node.key, random, client) if random.random() < 0.7 else PREFACE + frames(random)
    changed = random.random() < 0.5
    if changed:
        # A mutated preface would make it HTTP/1.1, which has its own fuzzer.
        text = text[: len(PREFACE)] + mutated(text[len(PREFACE) :], random)
    with linked(node, random.choice((node.rest_port, node.grpc_port)), "h2") as link:
        answer = talk(link, pieces(text, random))
    for event in _events(client, answer):
        _check(event, text)


def _events(client: H2Connection, answer: bytes) -> list[Event]:
    """The events of a reply, or none if the library rejects it: after a mutation it may not match the request."""
    with suppress(ProtocolError, KeyError):
        return list(client.receive_data(answer))
    return []


def _check(event: Event, cause: bytes) -> None:
    if isinstance(event, ResponseReceived | TrailersReceived):
        headers = dict(event.headers or ())
        grpc, http = headers.get(b"grpc-status"), headers.get(b":status", b"200")
        wrong = grpc == b"2" or http in (b"500", b"502", b"504")
        assert not wrong and b"internal error" not in headers.get(b"grpc-message", b""), (
            f"{headers} for {cause!r:.4000}"
        )


def calls(key: str, random: Random, client: H2Connection | None = None) -> bytes:
    """The bytes that a client sends for a few calls, preface included."""
    client = client or H2Connection(_LOOSE)
    client.initiate_connection()
    for number in range(random.choice((1, 1, 3, 10))):
        with suppress(ProtocolError, KeyError):
            _call(client, 2 * number + 1, key, random)
        if random.random() < 0.2:
            with suppress(ProtocolError, KeyError):
                _aside(client, 2 * number + 1, random)
    return client.data_to_send()


def _call(client: H2Connection, stream: int, key: str, random: Random) -> None:
    method = random.choice(METHODS)
    path = f"/{SERVICE.full_name}/{method.name}".encode()
    if random.random() < 0.1:
        path = random.choice(_PATHS)
    verb = random.choice((b"POST",) * 9 + (b"GET",))
    headers = [(b":method", verb), (b":scheme", b"https"), (b":path", path), (b":authority", b"x")]
    headers += [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    if random.random() < 0.8:
        headers.append((b"x-api-key", key.encode()))
    headers += random.choices(_HEADERS, k=random.choice((0, 0, 0, 1, 3)))
    if random.random() < 0.05:
        random.shuffle(headers)
    client.send_headers(stream, headers, end_stream=random.random() < 0.1)
    for _ in range(random.choice((0, 1, 1, 2))):
        client.send_data(stream, _message(body(method, random)[:16_000], random)[:16_384])
    if random.random() < 0.8:
        client.end_stream(stream)


def _message(content: bytes, random: Random) -> bytes:
    """A gRPC message frame, now and then with a wrong flag or length."""
    flag = random.choice((0,) * 9 + (1, 255))
    length = len(content) if random.random() < 0.8 else random.choice((0, 1, 2**26, 2**32 - 1))
    return bytes((flag,)) + length.to_bytes(4) + content


def _aside(client: H2Connection, stream: int, random: Random) -> None:
    """Send a frame that belongs to no call."""
    match random.randrange(5):
        case 0:
            client.ping(random.randbytes(8))
        case 1:
            client.reset_stream(stream, random.choice(list(ErrorCodes)))
        case 2:
            client.increment_flow_control_window(random.choice((1, 2**31 - 1)), random.choice((None, stream)))
        case 3:
            client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: random.choice((0, 1, 2**31 - 1))})
        case _:
            client.close_connection()


def frames(random: Random) -> bytes:
    """Frames with random headers, mostly of an existing type, and random content."""
    return b"".join(_frame(random) for _ in range(random.choice((1, 3, 20, 200))))


def _frame(random: Random) -> bytes:
    payload = random.randbytes(random.choice((0, 4, 5, 6, 8, 30)))
    length = len(payload) if random.random() < 0.9 else random.choice((0, 1, 16_384, 16_385, 2**24 - 1))
    kind = random.randrange(10) if random.random() < 0.9 else random.randrange(256)
    stream = random.choice((0, 1, 1, 2, 3, 2**31 - 1, 2**32 - 1))
    return length.to_bytes(3) + bytes((kind, random.choice((0, 1, 4, 5, 8, 32, 255)))) + stream.to_bytes(4) + payload
