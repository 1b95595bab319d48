"""Where inbounds listen, by which ports and transports users connect, and what only one process can have. Pure.

Type names and numbers: `app/proxyman/config.proto`, `transport/internet/**/config.proto` of Xray-core 26.3.27.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drivers.process.generation import only_interface, only_wireguard
from drivers.sockets.sock_diag import Ports
from drivers.xray import messages
from drivers.xray.accounts import Inbound
from drivers.xray.compat import FORWARDING, is_local
from drivers.xray.messages import is_on_path, receiver_of, stream_of
from drivers.xray.overrides import SENT_BY_NO_CLIENT
from drivers.xray.rules import bridged
from drivers.xray.wireguard import is_wireguard
from protos import xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig, ReceiverConfig, StreamConfig

# Transports by their names in a converted configuration: those with one user per connection, …
_RAW = ("", "tcp")
_ONE_TO_ONE = (*_RAW, "websocket", "httpupgrade")
# … and those over UDP. With all others a connection carries many requests, behind a reverse proxy those of many users.
_UDP = ("mkcp", "hysteria", "quic")
# Protocols whose datagrams are independent of each other.
_APART = (messages.SHADOWSOCKS, messages.SHADOWSOCKS_2022, messages.SHADOWSOCKS_2022_SINGLE, messages.DOKODEMO)
# How to describe a handler that only one process can have, by the type of its settings.
_SINGLE = {messages.TUN: only_interface, messages.WIREGUARD: only_wireguard}

# Words for transports and protocols in the bill, if they differ from the configuration's.
_NAMED = {"httpupgrade": "websocket", "splithttp": "xhttp"}
_OF_PROTOCOLS = {
    **dict.fromkeys((messages.SHADOWSOCKS, messages.SHADOWSOCKS_2022, messages.SHADOWSOCKS_2022_SINGLE), "shadowsocks"),
    messages.WIREGUARD: "wireguard",
}

_BY_UDP = "its users connect over UDP, where the node cannot distinguish Xray's connections"
_BY_OTHERS = "its users connect through another server, and the node cannot attribute that server's connections"


@dataclass(frozen=True)
class Ingress:
    """The TCP ports by which users reach one inbound; none if they connect through another server.

    `shared`: access lines with one endpoint may belong to several users. `datagrams`: lines with a UDP target belong to
    users who connect over UDP. `either`: lines do not tell those users from the ones by TCP. `forwards`: connections to
    the same ports may be passed on to another inbound or server. `fronted`: a reverse proxy may report clients'
    addresses, and have their sockets. `crowded`: one connection can carry several handshakes, or access lines do not
    name it.
    """

    ports: Ports
    shared: bool = False
    datagrams: bool = False
    either: bool = False
    forwards: bool = False
    fronted: bool = False
    crowded: bool = False


def ingress_of(handlers: Iterable[InboundHandlerConfig], inbounds: Mapping[str, Inbound]) -> dict[str, Ingress]:
    """The TCP ingress of the managed inbounds by tag, without those on UDP alone."""
    handlers = list(handlers)
    front = tuple(some for handler in handlers if _falls_back(handler) for some in ports_of(receiver_of(handler)))
    found = {}
    for handler in handlers:
        receiver = receiver_of(handler)
        if handler.tag in inbounds and not is_over_udp(handler):
            # With the PROXY protocol access lines have the endpoint that the sender names. The sender may be an
            # inbound of this core that falls back on this one: then clients connect to the ports of that.
            proxied = _takes_proxy_protocol(receiver.stream_settings)
            own = () if is_on_path(receiver) else ports_of(receiver)
            protocol, transport = inbounds[handler.tag].protocol, receiver.stream_settings.protocol_name
            found[handler.tag] = Ingress(
                front if proxied else own,
                shared=transport not in _ONE_TO_ONE or protocol == "shadowsocks_2022",
                datagrams=protocol == "shadowsocks",
                either=protocol == "shadowsocks_2022",
                forwards=proxied or _falls_back(handler),
                fronted=(proxied and not front) or _believes_forwarded(receiver.stream_settings),
                crowded=proxied or transport not in _ONE_TO_ONE,
            )
    return found


def unseen(inbounds: Mapping[str, Inbound], ingress: Mapping[str, Ingress]) -> dict[str, str]:
    """The managed inbounds whose connections cannot be attributed to users, and why."""
    reasons = {tag: _BY_UDP if tag not in ingress else _BY_OTHERS for tag in inbounds}
    return {tag: why for tag, why in reasons.items() if tag not in ingress or not ingress[tag].ports}


class Listens:
    """Where the inbounds of a configuration listen, managed or not. Satisfies `Listening` of the generations."""

    base: Config
    inbounds: Mapping[str, Inbound]

    @property
    def ports(self) -> tuple[range, ...]:
        return tuple(ports for handler in self.base.inbound for ports in ports_of(receiver_of(handler)))

    @property
    def listens(self) -> Mapping[int, frozenset[bytes]]:
        return _listens(self.base.inbound)

    @property
    def datagrams(self) -> frozenset[int]:
        some = [handler for handler in self.base.inbound if handler.proxy_settings.type in _APART]
        # For traffic to other addresses (TPROXY) the kernel runs no SO_REUSEPORT program.
        return frozenset(
            _listens(one for one in some if not (is_over_udp(one) or stream_of(one).socket_settings.tproxy))
        )

    @property
    def sessions(self) -> frozenset[int]:
        return frozenset(_listens(filter(is_over_udp, self.base.inbound)))

    @property
    def exclusive(self) -> list[str]:
        """Without the users and WireGuard keys of managed inbounds."""
        outbounds = [(handler.proxy_settings.type, handler.tag) for handler in self.base.outbound]
        inbounds = [(handler.proxy_settings.type, handler.tag) for handler in self.base.inbound]
        others = [(kind, tag) for kind, tag in inbounds if tag not in self.inbounds]
        found = [_SINGLE[kind](tag) for kind, tag in (*others, *outbounds) if kind in _SINGLE]
        bridges = "bridges of the reverse proxy {!r} stay connected to the old process"
        found += map(bridges.format, bridged(self.base))
        # Xray's client does not notice an unreachable port, only the core's own goodbye.
        return found + [
            f"clients of {handler.tag!r} (XHTTP over HTTP/3) would reach a new core only after half a minute"
            for handler in filter(_is_http_3, self.base.inbound)
        ]


def transport_of(handler: InboundHandlerConfig) -> str:
    """How users connect to an inbound, in a word of `Bill.transports`; "local" behind a server of this machine."""
    receiver = receiver_of(handler)
    stream = receiver.stream_settings
    if is_local(receiver):
        return "local"
    if stream.protocol_name not in _RAW:
        return _NAMED.get(stream.protocol_name, stream.protocol_name)
    if stream.security_type:
        return "reality" if stream.security_type == messages.REALITY else "tls"
    return _OF_PROTOCOLS.get(handler.proxy_settings.type, "tcp")


def is_over_udp(handler: InboundHandlerConfig) -> bool:
    """Whether its clients have sessions over UDP, through its transport or its protocol."""
    transport = stream_of(handler).protocol_name
    return transport in _UDP or _is_http_3(handler) or is_wireguard(handler)


def _is_http_3(handler: InboundHandlerConfig) -> bool:
    """Whether it is XHTTP with a TLS that offers only HTTP/3."""
    stream = stream_of(handler)
    found = [settings.value for settings in stream.security_settings if settings.type == messages.TLS]
    offered = [name for value in found for name in xray_pb2.TlsConfig.FromString(value).next_protocol]
    return stream.protocol_name == "splithttp" and offered == ["h3"]


def _listens(handlers: Iterable[InboundHandlerConfig]) -> dict[int, frozenset[bytes]]:
    """By port: the addresses on which inbounds listen, each with its socket options."""
    found: dict[int, frozenset[bytes]] = {}
    for receiver in map(receiver_of, handlers):
        if not is_on_path(receiver):
            options = receiver.stream_settings.socket_settings.SerializeToString(deterministic=True)
            for port in (port for ports in ports_of(receiver) for port in ports):
                found[port] = found.get(port, frozenset()) | {_host(receiver) + b" " + options}
    return found


def _host(receiver: ReceiverConfig) -> bytes:
    """The listen address; empty for any unspecified one, of either family."""
    return receiver.listen.domain.encode() or (receiver.listen.ip if any(receiver.listen.ip) else b"")


def ports_of(receiver: ReceiverConfig) -> tuple[range, ...]:
    """The ports on which an inbound listens."""
    return tuple(range(ports.first, ports.last + 1) for ports in receiver.port_list.range)


def _falls_back(handler: InboundHandlerConfig) -> bool:
    kind, value = handler.proxy_settings.type, handler.proxy_settings.value
    return kind in (messages.VLESS, messages.TROJAN) and bool(xray_pb2.FallbacksConfig.FromString(value).fallbacks)


def _takes_proxy_protocol(stream: StreamConfig) -> bool:
    return stream.socket_settings.accept_proxy_protocol or any(map(_accepts_proxy, stream.transport_settings))


def _believes_forwarded(stream: StreamConfig) -> bool:
    """Whether it believes X-Forwarded-For of somebody."""
    trusted = {*stream.socket_settings.trusted_x_forwarded_for} - {SENT_BY_NO_CLIENT}
    return bool(trusted) and stream.protocol_name in (*FORWARDING, "grpc")


def _accepts_proxy(transport: xray_pb2.TransportConfig) -> bool:
    settings = transport.settings
    if settings.type == messages.TCP:
        return xray_pb2.TcpConfig.FromString(settings.value).accept_proxy_protocol
    if settings.type in (messages.WEBSOCKET, messages.HTTP_UPGRADE):
        return xray_pb2.UpgradeConfig.FromString(settings.value).accept_proxy_protocol
    return False
