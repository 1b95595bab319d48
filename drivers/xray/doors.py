"""On which of the core's sockets the users of an inbound come in. Pure.

Type names and numbers: `app/proxyman/config.proto`, `transport/internet/**/config.proto` of Xray-core 26.3.27.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from drivers.sockets.connections import Ports
from drivers.xray.accounts import Inbound
from drivers.xray.streams import TLS
from drivers.xray.wireguard import is_wireguard
from protos import xray_pb2
from protos.xray_pb2 import InboundHandlerConfig, ReceiverConfig, StreamConfig

# Transports by their names in a converted configuration. Those of one connection for one user, …
_ONE_TO_ONE = ("", "tcp", "websocket", "httpupgrade")
# … and those over UDP. Of all others one connection can carry many requests, a reverse proxy's those of many users.
_UDP = ("mkcp", "hysteria", "quic")
_XHTTP, _HTTP_3 = "splithttp", ["h3"]
_TCP_SETTINGS = "xray.transport.internet.tcp.Config"
_UPGRADE_SETTINGS = (
    "xray.transport.internet.websocket.Config",
    "xray.transport.internet.httpupgrade.Config",
)
_FALLBACKS = ("xray.proxy.vless.inbound.Config", "xray.proxy.trojan.ServerConfig")

_BY_UDP = "its users come by UDP, and Xray does not tell their connections apart"
_BY_OTHERS = "its users come by another server, and by which of its connections each does is not known"


@dataclass(frozen=True)
class Door:
    """Where users of one inbound come in by TCP.

    `shared`: lines with one endpoint may be of several users' connections. `datagrams`: lines with a UDP target are of
    users who came by UDP. `leads_on`: others come by the same ports, too, whom it leads to another inbound or a server.
    Without ports users come by somebody else's server.
    """

    ports: Ports
    shared: bool = False
    datagrams: bool = False
    leads_on: bool = False


def doors(handlers: Iterable[InboundHandlerConfig], inbounds: Mapping[str, Inbound]) -> dict[str, Door]:
    """The doors of the managed inbounds, by tag. An inbound on UDP alone has none."""
    handlers = list(handlers)
    front = tuple(some for handler in handlers if _falls_back(handler) for some in _ports(_receiver(handler)))
    found = {}
    for handler in handlers:
        receiver = _receiver(handler)
        if handler.tag in inbounds and not is_over_udp(handler):
            # With the PROXY protocol lines carry whom the sender names: one of our own, if it falls back on this one.
            told = _told_by_proxy(receiver.stream_settings)
            door = _door(inbounds[handler.tag].protocol, receiver.stream_settings.protocol_name)
            ports, leads_on = front if told else _own_ports(receiver), told or _falls_back(handler)
            found[handler.tag] = replace(door, ports=ports, leads_on=leads_on)
    return found


def unseen(inbounds: Mapping[str, Inbound], doors: Mapping[str, Door]) -> dict[str, str]:
    """The managed inbounds of whose users' connections nobody knows whose they are, and why."""
    reasons = {tag: _BY_UDP if tag not in doors else _BY_OTHERS for tag in inbounds}
    return {tag: why for tag, why in reasons.items() if tag not in doors or not doors[tag].ports}


def entrances(handlers: Iterable[InboundHandlerConfig]) -> tuple[range, ...]:
    """The ports of all inbounds, whoever their users are."""
    return tuple(ports for handler in handlers for ports in _ports(_receiver(handler)))


def is_over_udp(handler: InboundHandlerConfig) -> bool:
    """Whether it has connections of its own over UDP, by its transport or by itself."""
    transport = _receiver(handler).stream_settings.protocol_name
    return transport in _UDP or is_http_3(handler) or is_wireguard(handler)


def is_http_3(handler: InboundHandlerConfig) -> bool:
    """Whether it is XHTTP and its TLS offers HTTP/3 alone."""
    stream = _receiver(handler).stream_settings
    return stream.protocol_name == _XHTTP and _offered(stream) == _HTTP_3


def is_transparent(handler: InboundHandlerConfig) -> bool:
    """Whether it takes what goes to others (TPROXY). The kernel has no program asked which process gets that."""
    return bool(_receiver(handler).stream_settings.socket_settings.tproxy)


def listens(handlers: Iterable[InboundHandlerConfig]) -> dict[int, frozenset[bytes]]:
    """By port at which addresses inbounds listen, with which options of their sockets."""
    found: dict[int, frozenset[bytes]] = {}
    for receiver in map(_receiver, handlers):
        if _is_path(receiver):
            continue
        here = _host(receiver) + b" " + receiver.stream_settings.socket_settings.SerializeToString(deterministic=True)
        for port in (port for ports in _ports(receiver) for port in ports):
            found[port] = found.get(port, frozenset()) | {here}
    return found


def _host(receiver: ReceiverConfig) -> bytes:
    """All that is unspecified is one address, of both families."""
    return receiver.listen.domain.encode() or (receiver.listen.ip if any(receiver.listen.ip) else b"")


def _door(protocol: str, transport: str) -> Door:
    # Lines of Shadowsocks-2022 do not say by which network a user came.
    shared = transport not in _ONE_TO_ONE or protocol == "shadowsocks_2022"
    return Door((), shared, protocol == "shadowsocks")


def _receiver(handler: InboundHandlerConfig) -> ReceiverConfig:
    return ReceiverConfig.FromString(handler.receiver_settings.value)


def _ports(receiver: ReceiverConfig) -> tuple[range, ...]:
    return tuple(range(ports.first, ports.last + 1) for ports in receiver.port_list.range)


def _own_ports(receiver: ReceiverConfig) -> tuple[range, ...]:
    return () if _is_path(receiver) else _ports(receiver)


def _is_path(receiver: ReceiverConfig) -> bool:
    """Whether it is a socket in the file system, whatever its port."""
    return receiver.listen.domain.startswith(("/", "@"))


def _offered(stream: StreamConfig) -> list[str]:
    """The protocols that its TLS has, if it has any."""
    found = [settings.value for settings in stream.security_settings if settings.type == TLS]
    return [name for value in found for name in xray_pb2.TlsConfig.FromString(value).next_protocol]


def _falls_back(handler: InboundHandlerConfig) -> bool:
    settings = handler.proxy_settings
    return settings.type in _FALLBACKS and bool(xray_pb2.FallbacksConfig.FromString(settings.value).fallbacks)


def _told_by_proxy(stream: StreamConfig) -> bool:
    return stream.socket_settings.accept_proxy_protocol or any(map(_accepts_proxy, stream.transport_settings))


def _accepts_proxy(transport: xray_pb2.TransportConfig) -> bool:
    settings = transport.settings
    if settings.type == _TCP_SETTINGS:
        return xray_pb2.TcpConfig.FromString(settings.value).accept_proxy_protocol
    if settings.type in _UPGRADE_SETTINGS:
        return xray_pb2.UpgradeConfig.FromString(settings.value).accept_proxy_protocol
    return False
