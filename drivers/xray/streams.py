"""The transport side of inbounds and outbounds: what could write files is taken over, and whether Vision fits. Pure.

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


def take_over_receiver(handler: InboundHandlerConfig) -> None:
    """Key logs and debug prints of an inbound's transport are off."""
    receiver = xray_pb2.ReceiverConfig.FromString(handler.receiver_settings.value)
    if receiver.HasField("stream_settings"):
        _take_over(receiver.stream_settings)
        handler.receiver_settings.value = receiver.SerializeToString()


def take_over_sender(handler: OutboundHandlerConfig) -> None:
    """The same for an outbound."""
    sender = xray_pb2.SenderConfig.FromString(handler.sender_settings.value)
    if sender.HasField("stream_settings"):
        _take_over(sender.stream_settings)
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
    """A transport, and those that XHTTP has for the way back."""
    yield stream
    for transport in stream.transport_settings:
        if transport.settings.type == SPLIT_HTTP:
            split = xray_pb2.SplitHttpConfig.FromString(transport.settings.value)
            if split.HasField("download_settings"):
                yield from _with_downloads(split.download_settings)


def strip_shared_password(handler: InboundHandlerConfig) -> None:
    """Hysteria's transport can have a password; where there are no users the core would let everybody in by it."""
    receiver = xray_pb2.ReceiverConfig.FromString(handler.receiver_settings.value)
    for transport in receiver.stream_settings.transport_settings:
        if transport.settings.type == HYSTERIA:
            hysteria = xray_pb2.HysteriaTransportConfig.FromString(transport.settings.value)
            hysteria.ClearField("auth")
            transport.settings.value = hysteria.SerializeToString()
            handler.receiver_settings.value = receiver.SerializeToString()


def carries_vision(handler: InboundHandlerConfig) -> bool:
    """Vision needs raw TCP without a header under TLS or REALITY, or VLESS's own encryption over anything.

    A user who has it where it does not fit could not connect at all (proxy/vless/inbound/inbound.go).
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


def _take_over(stream: StreamConfig) -> None:
    for security in stream.security_settings:
        _take_over_security(security)
    for transport in stream.transport_settings:
        if transport.settings.type == SPLIT_HTTP:
            _take_over_download(transport.settings)


def _take_over_security(security: TypedMessage) -> None:
    if security.type == TLS:
        tls = xray_pb2.TlsConfig.FromString(security.value)
        tls.ClearField("master_key_log")
        security.value = tls.SerializeToString()
    elif security.type == REALITY:
        reality = xray_pb2.RealityConfig.FromString(security.value)
        reality.ClearField("master_key_log")
        # It prints straight to stdout, past the logger.
        reality.ClearField("show")
        security.value = reality.SerializeToString()


def _take_over_download(settings: TypedMessage) -> None:
    """XHTTP can have a transport of its own for the way back."""
    split = xray_pb2.SplitHttpConfig.FromString(settings.value)
    if split.HasField("download_settings"):
        _take_over(split.download_settings)
        settings.value = split.SerializeToString()
