"""Transports of inbounds and outbounds: switch off what writes files, and check whether Vision fits. Pure.

Type names and numbers: `transport/internet/*/config.proto` of Xray-core 26.3.27.
"""

from __future__ import annotations

from collections.abc import Iterator

from protos import xray_pb2
from protos.xray_pb2 import InboundHandlerConfig, OutboundHandlerConfig, StreamConfig, TypedMessage

TLS = "xray.transport.internet.tls.Config"
REALITY = "xray.transport.internet.reality.Config"
TCP = "xray.transport.internet.tcp.Config"
SPLIT_HTTP = "xray.transport.internet.splithttp.Config"
HYSTERIA = "xray.transport.internet.hysteria.Config"
HTTP_HEADER = "xray.transport.internet.headers.http.Config"


def override_receiver(handler: InboundHandlerConfig) -> None:
    """Switch off key logs and debug prints in an inbound's transport."""
    receiver = xray_pb2.ReceiverConfig.FromString(handler.receiver_settings.value)
    if receiver.HasField("stream_settings"):
        _override(receiver.stream_settings)
        handler.receiver_settings.value = receiver.SerializeToString()


def override_sender(handler: OutboundHandlerConfig) -> None:
    """Switch off key logs and debug prints in an outbound's transport."""
    sender = xray_pb2.SenderConfig.FromString(handler.sender_settings.value)
    if sender.HasField("stream_settings"):
        _override(sender.stream_settings)
        handler.sender_settings.value = sender.SerializeToString()


def of_receiver(handler: InboundHandlerConfig) -> Iterator[StreamConfig]:
    """The transports of an inbound."""
    receiver = xray_pb2.ReceiverConfig.FromString(handler.receiver_settings.value)
    return _with_downloads(receiver.stream_settings)


def of_sender(handler: OutboundHandlerConfig) -> Iterator[StreamConfig]:
    """The transports of an outbound."""
    sender = xray_pb2.SenderConfig.FromString(handler.sender_settings.value)
    return _with_downloads(sender.stream_settings)


def _with_downloads(stream: StreamConfig) -> Iterator[StreamConfig]:
    """A transport, and the separate download transports of XHTTP."""
    yield stream
    for transport in stream.transport_settings:
        if transport.settings.type == SPLIT_HTTP:
            split = xray_pb2.SplitHttpConfig.FromString(transport.settings.value)
            if split.HasField("download_settings"):
                yield from _with_downloads(split.download_settings)


def strip_shared_password(handler: InboundHandlerConfig) -> None:
    """Remove the password of Hysteria's transport, by which the core admits clients while there are no users."""
    receiver = xray_pb2.ReceiverConfig.FromString(handler.receiver_settings.value)
    for transport in receiver.stream_settings.transport_settings:
        if transport.settings.type == HYSTERIA:
            hysteria = xray_pb2.HysteriaTransportConfig.FromString(transport.settings.value)
            hysteria.ClearField("auth")
            transport.settings.value = hysteria.SerializeToString()
            handler.receiver_settings.value = receiver.SerializeToString()


def carries_vision(handler: InboundHandlerConfig) -> bool:
    """Whether an inbound can carry Vision: raw TCP without a header under TLS or REALITY, or VLESS's own encryption.

    With Vision on any other inbound a user could not connect at all (proxy/vless/inbound/inbound.go).
    """
    settings = xray_pb2.VlessInboundConfig.FromString(handler.proxy_settings.value)
    if settings.decryption not in ("", "none"):
        return True
    stream = xray_pb2.ReceiverConfig.FromString(handler.receiver_settings.value).stream_settings
    raw = stream.protocol_name in ("", "tcp")
    return raw and stream.security_type in (TLS, REALITY) and not any(map(_has_http_header, stream.transport_settings))


def _has_http_header(transport: xray_pb2.TransportConfig) -> bool:
    if transport.settings.type != TCP:
        return False
    return xray_pb2.TcpConfig.FromString(transport.settings.value).header_settings.type == HTTP_HEADER


def _override(stream: StreamConfig) -> None:
    for security in stream.security_settings:
        _override_security(security)
    for transport in stream.transport_settings:
        if transport.settings.type == SPLIT_HTTP:
            _override_download(transport.settings)


def _override_security(security: TypedMessage) -> None:
    if security.type == TLS:
        tls = xray_pb2.TlsConfig.FromString(security.value)
        tls.ClearField("master_key_log")
        security.value = tls.SerializeToString()
    elif security.type == REALITY:
        reality = xray_pb2.RealityConfig.FromString(security.value)
        reality.ClearField("master_key_log")
        # `show` prints straight to stdout, past the logger.
        reality.ClearField("show")
        security.value = reality.SerializeToString()


def _override_download(settings: TypedMessage) -> None:
    """Switch them off in XHTTP's separate download transport."""
    split = xray_pb2.SplitHttpConfig.FromString(settings.value)
    if split.HasField("download_settings"):
        _override(split.download_settings)
        settings.value = split.SerializeToString()
