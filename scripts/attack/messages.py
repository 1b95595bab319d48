"""Protobuf fuzzer: almost valid bodies for all methods over REST and gRPC, sent with the key."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from node.api.methods import METHODS, SERVICE, Kind, Method
from scripts.attack.link import blind
from scripts.attack.mutate import mutated
from scripts.staging.node import NodeProcess
from scripts.staging.target import credentials

_STREAMS = (Kind.LOGS, Kind.EVENTS)
# Seconds that a call may take: deployed controllers wait as long for a Start.
_LONGEST = 20.0
# Seconds to wait for an event; a subscription may match none.
_QUIET = 0.5
# The largest size of a huge field, in bytes.
_HUGE = 2 << 20
# The tags of nested groups, which none of our messages has, and depths of nesting.
_GROUPS, _DEPTH = (b"\x7b", b"\x7c"), (10, 99, 101, 10_000)
_WORDS = ("", "a", "in-0", "\0", "é" * 300, "{}", "null", '{"inbounds":[]}', "..", "x" * 5000, "-1")
_NUMBERS = (0, 1, 2, 7, 2**31 - 1)

_kept = threading.local()


def attack(node: NodeProcess, random: Random) -> None:
    """One call over REST or gRPC. The node may reply with an error of the caller, never with an internal one."""
    method = random.choice(METHODS)
    random.choice((_over_rest, _over_grpc))(node, method, random)


def body(method: Method, random: Random) -> bytes:
    """A body that resembles a request of this method."""
    return random.choice(_SHAPES)(method, random)


def valid(method: Method, random: Random) -> bytes:
    """A valid request of the method, with random fields."""
    message = method.request()
    fill(message, random)
    return message.SerializeToString()


def _cut(method: Method, random: Random) -> bytes:
    """Several length-prefixed messages in one body, as streams over REST send them."""
    parts = [valid(method, random) for _ in range(random.randrange(4))]
    return b"".join(varint(len(part)) + part for part in parts)


def _nested(method: Method, random: Random) -> bytes:
    depth = random.choice(_DEPTH)
    if random.random() < 0.5:
        return _GROUPS[0] * depth + _GROUPS[1] * random.choice((depth, depth - 1, 0))
    inside = b""
    for _ in range(min(depth, 300)):
        inside = bytes((random.choice((0x0A, 0x12, 0x1A, 0x7A)),)) + varint(len(inside)) + inside
    return inside


def _huge(method: Method, random: Random) -> bytes:
    tag = bytes((random.choice((0x0A, 0x12, 0x1A, 0x7A)),))
    size = random.randrange(_HUGE)
    return tag + varint(random.choice((size, size, 2**31, 2**63))) + b"x" * size


_SHAPES: tuple[Callable[[Method, Random], bytes], ...] = (
    lambda method, random: b"",
    lambda method, random: random.randbytes(random.randrange(60)),
    valid,
    _cut,
    lambda method, random: mutated(valid(method, random), random),
    lambda method, random: mutated(valid(method, random), random),
    lambda method, random: mutated(_cut(method, random), random),
    _nested,
    lambda method, random: _huge(method, random) if random.random() < 0.05 else b"\x0a\x05ab",
)


def fill(message: Message, random: Random) -> None:
    """Set random fields to random values."""
    for field in message.DESCRIPTOR.fields:
        for _ in range(random.choice((0, 1, 1, 2)) if field.is_repeated else random.choice((0, 1))):
            _put(message, field, random)


def _put(message: Message, field: Any, random: Random) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[random.choice(_WORDS)] = random.choice(_WORDS)
    elif field.message_type is not None:
        inside = getattr(message, field.name)
        inside = inside.add() if field.is_repeated else inside
        inside.SetInParent()
        fill(inside, random)
    elif field.is_repeated:
        getattr(message, field.name).append(_value(field, random))
    else:
        setattr(message, field.name, _value(field, random))


def _value(field: Any, random: Random) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return random.choice(_WORDS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    return random.choice(_NUMBERS)


def varint(number: int) -> bytes:
    rest, digits = number >> 7, number & 0x7F
    return bytes((digits | 0x80,)) + varint(rest) if rest else bytes((digits,))


def _over_rest(node: NodeProcess, method: Method, random: Random) -> None:
    content = body(method, random)
    address = node.host, random.choice((node.rest_port, node.grpc_port))
    connection = http.client.HTTPSConnection(*address, timeout=_LONGEST, context=blind("http/1.1"))
    headers = credentials(node.key, "bearer") | {"Content-Type": "application/x-protobuf"}
    try:
        connection.request(random.choice(method.verbs), method.path, content, headers)
        response = connection.getresponse()
        answer = b"" if method.kind in _STREAMS else response.read()
        assert response.status not in (502, 504, 505), f"{response.status} for {content[:2000]!r}"
        assert b"internal error" not in answer, f"{answer!r} for {method.name} {content[:2000]!r}"
    finally:
        connection.close()


def _over_grpc(node: NodeProcess, method: Method, random: Random) -> None:
    contents = [body(method, random) for _ in range(random.choice((0, 1, 3)) if method.kind is Kind.FEED else 1)]
    call = _call(_channel(node), method)
    metadata = tuple(credentials(node.key, "bearer").items())
    try:
        request = iter(contents) if method.kind is Kind.FEED else contents[0]
        answer = call(request, metadata=metadata, timeout=_QUIET if method.kind is Kind.EVENTS else _LONGEST)
        if method.kind in _STREAMS:
            with suppress(StopIteration):
                next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        found: Any = error
        if method.kind is Kind.EVENTS and found.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return
        text = f"{found.code().name}: {found.details()} for {method.name} {contents!r:.2000}"
        assert found.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED), text
        assert "internal error" not in (found.details() or ""), text


def _call(channel: grpc.Channel, method: Method) -> Any:
    kinds = {Kind.UNARY: channel.unary_unary, Kind.FEED: channel.stream_unary}
    return kinds.get(method.kind, channel.unary_stream)(f"/{SERVICE.full_name}/{method.name}")


def _channel(node: NodeProcess) -> grpc.Channel:
    """The channel of this thread and node, made on first use."""
    if getattr(_kept, "port", None) != node.grpc_port:
        pinned = grpc.ssl_channel_credentials(node.pem.encode())
        limit = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        _kept.channel = grpc.secure_channel(f"{node.host}:{node.grpc_port}", pinned, limit)
        _kept.port = node.grpc_port
    channel: grpc.Channel = _kept.channel
    return channel
