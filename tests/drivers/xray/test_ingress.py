"""The ports by which users of an inbound connect, and how far its access lines can be trusted."""

from __future__ import annotations

import pytest

from drivers.xray import messages
from drivers.xray.accounts import Inbound
from drivers.xray.ingress import Ingress, ingress_of, transport_of, unseen
from drivers.xray.overrides import SENT_BY_NO_CLIENT
from protos import xray_pb2
from protos.xray_pb2 import InboundHandlerConfig, ReceiverConfig, StreamConfig, TypedMessage

TLS_FRONT = "xray.proxy.trojan.ServerConfig"
UPGRADE = "xray.transport.internet.{}.Config"


def handler(
    tag: str, *ports: tuple[int, int], stream: StreamConfig | None = None, fallbacks: int = 0
) -> InboundHandlerConfig:
    receiver = ReceiverConfig(stream_settings=stream)
    receiver.port_list.range.extend(xray_pb2.PortRange(first=first, last=last) for first, last in ports)
    settings = xray_pb2.FallbacksConfig(fallbacks=[xray_pb2.Fallback()] * fallbacks)
    return InboundHandlerConfig(
        tag=tag,
        receiver_settings=TypedMessage(value=receiver.SerializeToString()),
        proxy_settings=TypedMessage(type=TLS_FRONT, value=settings.SerializeToString()),
    )


def of(protocol: str, stream: StreamConfig) -> Ingress | None:
    found = ingress_of([handler("in", (443, 443), stream=stream)], {"in": Inbound("in", protocol)})
    return found.get("in")


def test_ports() -> None:
    """An ingress has all ports of its inbound; inbounds that are not managed have no ingress."""
    found = ingress_of(
        [handler("in", (443, 443), (1000, 1009)), handler("other", (80, 80))], {"in": Inbound("in", "trojan")}
    )
    assert found == {"in": Ingress((range(443, 444), range(1000, 1010)))}


@pytest.mark.parametrize(
    ("transport", "shared"),
    [("tcp", False), ("websocket", False), ("httpupgrade", False), ("grpc", True), ("splithttp", True), ("new", True)],
)
def test_transports(transport: str, shared: bool) -> None:
    """A connection with many requests may have many users, also with an unknown transport."""
    found = of("vless", StreamConfig(protocol_name=transport))
    assert found is not None
    assert found.shared is shared


def test_fallbacks_forward() -> None:
    """Inbounds with fallbacks forward connections, and inbounds behind them share their ports."""
    proxied = StreamConfig()
    proxied.socket_settings.accept_proxy_protocol = True
    tags = ("in", "front", "behind")
    handlers = [handler("in", (80, 80)), handler("front", (443, 443), fallbacks=1)]
    found = ingress_of(
        [*handlers, handler("behind", (81, 81), stream=proxied)], {tag: Inbound(tag, "trojan") for tag in tags}
    )
    assert {tag: found[tag].forwards for tag in tags} == {"in": False, "front": True, "behind": True}


@pytest.mark.parametrize(
    ("transport", "trusted", "proxied", "fronted"),
    [
        ("tcp", [], True, True),
        ("websocket", ["X-Forwarded-For"], False, True),
        ("grpc", ["X-Mine"], False, True),
        ("websocket", [SENT_BY_NO_CLIENT], False, False),
        ("websocket", [], False, False),
        ("tcp", ["X-Forwarded-For"], False, False),
    ],
)
def test_behind_a_reverse_proxy(transport: str, trusted: list[str], proxied: bool, fronted: bool) -> None:
    """Clients' addresses may come by the PROXY protocol, or by a header that the inbound trusts."""
    stream = StreamConfig(protocol_name=transport)
    stream.socket_settings.trusted_x_forwarded_for.extend(trusted)
    stream.socket_settings.accept_proxy_protocol = proxied
    found = of("vless", stream)
    assert found is not None
    assert found.fronted is fronted


def test_connections_that_cannot_be_attributed() -> None:
    """Users over UDP, or behind a server: one that connects to the core itself, or by a unix socket."""
    proxied, path = StreamConfig(), handler("path", (443, 443))
    proxied.socket_settings.accept_proxy_protocol = True
    receiver = ReceiverConfig.FromString(path.receiver_settings.value)
    receiver.listen.domain = "/run/in.sock"
    path.receiver_settings.value = receiver.SerializeToString()
    udp = handler("udp", (82, 82), stream=StreamConfig(protocol_name="mkcp"))
    handlers = [handler("in", (80, 80)), handler("proxied", (81, 81), stream=proxied), udp, path]
    inbounds = {one.tag: Inbound(one.tag, "trojan") for one in handlers}
    found = unseen(inbounds, ingress_of(handlers, inbounds))
    assert found.keys() == {"proxied", "udp", "path"} and "UDP" in found["udp"] and "server" in found["path"]
    # Behind another inbound of the same core they can be attributed.
    handlers.append(handler("front", (443, 443), fallbacks=1))
    assert "proxied" not in unseen(inbounds, ingress_of(handlers, inbounds))


@pytest.mark.parametrize(
    ("transport", "security", "name"),
    [
        ("", "", "tcp"),
        ("tcp", messages.TLS, "tls"),
        ("tcp", messages.REALITY, "reality"),
        ("websocket", messages.TLS, "websocket"),
        ("httpupgrade", "", "websocket"),
        ("splithttp", messages.REALITY, "xhttp"),
        ("grpc", messages.TLS, "grpc"),
        ("hysteria", messages.TLS, "hysteria"),
    ],
)
def test_how_users_connect(transport: str, security: str, name: str) -> None:
    """In the words of the bill; behind a server on this machine it is not known."""
    found = handler("in", (443, 443), stream=StreamConfig(protocol_name=transport, security_type=security))
    assert transport_of(found) == name
    for address in (b"\x7f\x00\x00\x01", bytes(15) + b"\x01"):
        receiver = ReceiverConfig.FromString(found.receiver_settings.value)
        receiver.listen.ip = address
        found.receiver_settings.value = receiver.SerializeToString()
        assert transport_of(found) == "local"


def test_how_users_of_shadowsocks_connect() -> None:
    found = handler("in", (443, 443))
    found.proxy_settings.type = messages.SHADOWSOCKS_2022
    assert transport_of(found) == "shadowsocks"


@pytest.mark.parametrize("transport", ["mkcp", "hysteria"])
def test_udp(transport: str) -> None:
    """Users over UDP have no connection that could be cut."""
    assert of("vless", StreamConfig(protocol_name=transport)) is None


def test_shadowsocks() -> None:
    """Shadowsocks also takes UDP on its port: its lines show that, those of Shadowsocks-2022 do not."""
    assert of("shadowsocks", StreamConfig()) == Ingress((range(443, 444),), datagrams=True)
    assert of("shadowsocks_2022", StreamConfig()) == Ingress((range(443, 444),), shared=True, either=True)


@pytest.mark.parametrize("how", ["socket", "tcp", "websocket", "httpupgrade"])
def test_proxy_protocol(how: str) -> None:
    """With the PROXY protocol clients use the ports of inbounds that fall back on this one, if there are any."""
    stream = StreamConfig()
    if how == "socket":
        stream.socket_settings.accept_proxy_protocol = True
    elif how == "tcp":
        value = xray_pb2.TcpConfig(accept_proxy_protocol=True).SerializeToString()
        stream.transport_settings.add(settings=TypedMessage(type=UPGRADE.format(how), value=value))
    else:
        value = xray_pb2.UpgradeConfig(accept_proxy_protocol=True).SerializeToString()
        stream.transport_settings.add(settings=TypedMessage(type=UPGRADE.format(how), value=value))
    inner = handler("in", (8080, 8080), stream=stream)
    inbounds = {"in": Inbound("in", "vless")}
    assert ingress_of([inner, handler("front", (443, 443), fallbacks=1)], inbounds)["in"].ports == (range(443, 444),)
    assert ingress_of([inner, handler("front", (443, 443))], inbounds)["in"].ports == ()
