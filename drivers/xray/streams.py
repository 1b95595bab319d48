"""Transports of inbounds and outbounds: switch off what writes files, and check whether Vision fits. Pure.

Type names and numbers: `transport/internet/*/config.proto` of Xray-core 26.3.27.
"""

from __future__ import annotations

from collections.abc import Iterator

from drivers.xray.messages import HTTP_HEADER, HYSTERIA, REALITY, SPLIT_HTTP, TCP, TLS, edited
from protos import xray_pb2
from protos.xray_pb2 import (
    Config,
    InboundHandlerConfig,
    OutboundHandlerConfig,
    ReceiverConfig,
    SenderConfig,
    StreamConfig,
)

Handler = InboundHandlerConfig | OutboundHandlerConfig


def handlers_of(base: Config) -> Iterator[Handler]:
    yield from base.inbound
    yield from base.outbound


def receiver_of(inbound: InboundHandlerConfig) -> ReceiverConfig:
    return ReceiverConfig.FromString(inbound.receiver_settings.value)


def stream_of(handler: Handler) -> StreamConfig:
    if isinstance(handler, InboundHandlerConfig):
        return receiver_of(handler).stream_settings
    return SenderConfig.FromString(handler.sender_settings.value).stream_settings


def place_of(handler: Handler) -> str:
    """The place of an inbound or outbound, for an error."""
    kind = "inbound" if isinstance(handler, InboundHandlerConfig) else "outbound"
    return f"{kind} {handler.tag[:60]!r}"


def override(handler: Handler) -> None:
    """Switch off key logs and debug prints in the transport."""
    if isinstance(handler, InboundHandlerConfig):
        with edited(handler.receiver_settings, ReceiverConfig) as receiver:
            _override(receiver.stream_settings)
    else:
        with edited(handler.sender_settings, SenderConfig) as sender:
            _override(sender.stream_settings)


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


def _override(stream: StreamConfig) -> None:
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
                _override(split.download_settings)
