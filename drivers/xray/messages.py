"""The messages of Xray's configuration: types, edits, inbounds, outbounds and transports, encoding by hand. Pure.

Type names: Xray-core 26.3.27 to 26.10.21. The encoding (https://protobuf.dev/programming-guides/encoding/) is for
messages that are needed 100,000 times. A tag is the field's number times 8, plus 2 for bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import Message

from protos import xray_pb2
from protos.xray_pb2 import (
    Config,
    InboundHandlerConfig,
    OutboundHandlerConfig,
    ReceiverConfig,
    SenderConfig,
    StreamConfig,
    TypedMessage,
)

M = TypeVar("M", bound=Message)
Version = tuple[int, ...]

# The prefix of tags that the node adds, and of no others.
OURS = "~txnode-"

COMMANDER = "xray.app.commander.Config"
DNS = "xray.app.dns.Config"
GEODATA = "xray.app.geodata.Config"
LOG = "xray.app.log.Config"
METRICS = "xray.app.metrics.Config"
OBSERVATORIES = ("xray.core.app.observatory.Config", "xray.core.app.observatory.burst.Config")
POLICY = "xray.app.policy.Config"
REVERSE = "xray.app.reverse.Config"
ROUTER = "xray.app.router.Config"
SENDER = "xray.app.proxyman.SenderConfig"
STATS = "xray.app.stats.Config"

BLACKHOLE = "xray.proxy.blackhole.Config"
DOKODEMO = "xray.proxy.dokodemo.Config"
FREEDOM = "xray.proxy.freedom.Config"
SHADOWSOCKS = "xray.proxy.shadowsocks.ServerConfig"
SHADOWSOCKS_2022 = "xray.proxy.shadowsocks_2022.MultiUserServerConfig"
SHADOWSOCKS_2022_SINGLE = "xray.proxy.shadowsocks_2022.ServerConfig"
TROJAN = "xray.proxy.trojan.ServerConfig"
TUN = "xray.proxy.tun.Config"
VLESS = "xray.proxy.vless.inbound.Config"
WIREGUARD = "xray.proxy.wireguard.DeviceConfig"

HTTP_HEADER = "xray.transport.internet.headers.http.Config"
HTTP_UPGRADE = "xray.transport.internet.httpupgrade.Config"
HYSTERIA = "xray.transport.internet.hysteria.Config"
REALITY = "xray.transport.internet.reality.Config"
SPLIT_HTTP = "xray.transport.internet.splithttp.Config"
TCP = "xray.transport.internet.tcp.Config"
TLS = "xray.transport.internet.tls.Config"
WEBSOCKET = "xray.transport.internet.websocket.Config"

Handler = InboundHandlerConfig | OutboundHandlerConfig


@contextmanager
def edited(packed: TypedMessage, message_type: type[M]) -> Iterator[M]:
    """Parse a message, and put it back with the changes that the block makes."""
    message = message_type.FromString(packed.value)
    yield message
    # Without a change nothing is written: that would add a message that is not there.
    if (value := message.SerializeToString()) != packed.value:
        packed.value = value


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Sizes(dict[int, bytes]):
    def __missing__(self, size: int) -> bytes:
        return varint(size)


# Sizes as varints; the usual ones are precomputed.
SIZE = _Sizes((size, varint(size)) for size in range(512))


def field(tag: bytes, value: bytes) -> bytes:
    """Encode a field of bytes, text or a message."""
    return tag + SIZE[len(value)] + value


def handlers_of(base: Config) -> Iterator[Handler]:
    yield from base.inbound
    yield from base.outbound


def receiver_of(inbound: InboundHandlerConfig) -> ReceiverConfig:
    return ReceiverConfig.FromString(inbound.receiver_settings.value)


def is_on_path(receiver: ReceiverConfig) -> bool:
    """Whether it listens on a unix socket, whatever its port."""
    return receiver.listen.domain.startswith(("/", "@"))


def stream_of(handler: Handler) -> StreamConfig:
    if isinstance(handler, InboundHandlerConfig):
        return receiver_of(handler).stream_settings
    return SenderConfig.FromString(handler.sender_settings.value).stream_settings


def place_of(handler: Handler) -> str:
    """The place of an inbound or outbound, for an error."""
    kind = "inbound" if isinstance(handler, InboundHandlerConfig) else "outbound"
    return f"{kind} {handler.tag[:60]!r}"


def override_transport(handler: Handler) -> None:
    """Switch off key logs and debug prints in the transport."""
    if isinstance(handler, InboundHandlerConfig):
        with edited(handler.receiver_settings, ReceiverConfig) as receiver:
            _override_stream(receiver.stream_settings)
    else:
        with edited(handler.sender_settings, SenderConfig) as sender:
            _override_stream(sender.stream_settings)


def with_downloads(stream: StreamConfig) -> Iterator[StreamConfig]:
    """A transport, and the separate download transports of XHTTP."""
    yield stream
    for transport in stream.transport_settings:
        if transport.settings.type == SPLIT_HTTP:
            split = xray_pb2.SplitHttpConfig.FromString(transport.settings.value)
            if split.HasField("download_settings"):
                yield from with_downloads(split.download_settings)


def strip_shared_password(inbound: InboundHandlerConfig) -> None:
    """Remove the password of Hysteria's transport, by which the core admits clients while there are no users."""
    with edited(inbound.receiver_settings, ReceiverConfig) as receiver:
        for transport in receiver.stream_settings.transport_settings:
            if transport.settings.type == HYSTERIA:
                with edited(transport.settings, xray_pb2.HysteriaTransportConfig) as hysteria:
                    hysteria.ClearField("auth")


def carries_vision(inbound: InboundHandlerConfig) -> bool:
    """Whether an inbound can carry Vision: raw TCP without a header under TLS or REALITY, or VLESS's own encryption.

    With Vision on any other inbound a user could not connect at all (proxy/vless/inbound/inbound.go).
    """
    settings = xray_pb2.VlessInboundConfig.FromString(inbound.proxy_settings.value)
    if settings.decryption not in ("", "none"):
        return True
    stream = stream_of(inbound)
    raw = stream.protocol_name in ("", "tcp") and stream.security_type in (TLS, REALITY)
    tcp = [transport.settings.value for transport in stream.transport_settings if transport.settings.type == TCP]
    headers = [xray_pb2.TcpConfig.FromString(value).header_settings.type for value in tcp]
    return raw and HTTP_HEADER not in headers


def _override_stream(stream: StreamConfig) -> None:
    for security in stream.security_settings:
        if security.type == TLS:
            with edited(security, xray_pb2.TlsConfig) as tls:
                tls.ClearField("master_key_log")
        elif security.type == REALITY:
            with edited(security, xray_pb2.RealityConfig) as reality:
                reality.ClearField("master_key_log")
                # `show` prints straight to stdout, past the logger.
                reality.ClearField("show")
    for transport in stream.transport_settings:
        if transport.settings.type == SPLIT_HTTP:
            with edited(transport.settings, xray_pb2.SplitHttpConfig) as split:
                _override_stream(split.download_settings)
