"""On which ports of the core the users of an inbound come in, and what its lines can be trusted to say."""

from __future__ import annotations

import pytest

from drivers.xray.accounts import Inbound
from drivers.xray.doors import Door, doors, unseen
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


def door(protocol: str, stream: StreamConfig) -> Door | None:
    found = doors([handler("in", (443, 443), stream=stream)], {"in": Inbound("in", protocol)})
    return found.get("in")


def test_ports() -> None:
    """A door has all the ports of its inbound, and inbounds that are not managed have none."""
    found = doors(
        [handler("in", (443, 443), (1000, 1009)), handler("other", (80, 80))], {"in": Inbound("in", "trojan")}
    )
    assert found == {"in": Door((range(443, 444), range(1000, 1010)))}


@pytest.mark.parametrize(
    ("transport", "shared"),
    [("tcp", False), ("websocket", False), ("httpupgrade", False), ("grpc", True), ("splithttp", True), ("new", True)],
)
def test_transports(transport: str, shared: bool) -> None:
    """Where a connection can carry many requests it may carry many users; an unknown transport may do so."""
    found = door("vless", StreamConfig(protocol_name=transport))
    assert found is not None
    assert found.shared is shared


def test_who_leads_on() -> None:
    """By the ports of an inbound with fallbacks others come, too, and so do the users of one that others lead to."""
    proxied = StreamConfig()
    proxied.socket_settings.accept_proxy_protocol = True
    tags = ("in", "front", "behind")
    handlers = [handler("in", (80, 80)), handler("front", (443, 443), fallbacks=1)]
    found = doors(
        [*handlers, handler("behind", (81, 81), stream=proxied)], {tag: Inbound(tag, "trojan") for tag in tags}
    )
    assert {tag: found[tag].leads_on for tag in tags} == {"in": False, "front": True, "behind": True}


def test_of_whose_users_nothing_is_known() -> None:
    """They come by UDP, or by a server in front of the core: by its own connections, or a socket in the file system."""
    proxied, path = StreamConfig(), handler("path", (443, 443))
    proxied.socket_settings.accept_proxy_protocol = True
    receiver = ReceiverConfig.FromString(path.receiver_settings.value)
    receiver.listen.domain = "/run/in.sock"
    path.receiver_settings.value = receiver.SerializeToString()
    udp = handler("udp", (82, 82), stream=StreamConfig(protocol_name="mkcp"))
    handlers = [handler("in", (80, 80)), handler("proxied", (81, 81), stream=proxied), udp, path]
    inbounds = {one.tag: Inbound(one.tag, "trojan") for one in handlers}
    found = unseen(inbounds, doors(handlers, inbounds))
    assert found.keys() == {"proxied", "udp", "path"} and "UDP" in found["udp"] and "server" in found["path"]
    # With a front of the core's own it is known.
    handlers.append(handler("front", (443, 443), fallbacks=1))
    assert "proxied" not in unseen(inbounds, doors(handlers, inbounds))


@pytest.mark.parametrize("transport", ["mkcp", "hysteria"])
def test_udp(transport: str) -> None:
    """Who comes by UDP has no connection that could be ended."""
    assert door("vless", StreamConfig(protocol_name=transport)) is None


def test_shadowsocks() -> None:
    """Shadowsocks takes datagrams on its port, too: its lines say so, those of Shadowsocks-2022 do not."""
    assert door("shadowsocks", StreamConfig()) == Door((range(443, 444),), datagrams=True)
    assert door("shadowsocks_2022", StreamConfig()) == Door((range(443, 444),), shared=True)


@pytest.mark.parametrize("how", ["socket", "tcp", "websocket", "httpupgrade"])
def test_proxy_protocol(how: str) -> None:
    """Where the sender tells who comes, he is on the ports of inbounds that fall back, if he is here at all."""
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
    assert doors([inner, handler("front", (443, 443), fallbacks=1)], inbounds)["in"].ports == (range(443, 444),)
    assert doors([inner, handler("front", (443, 443))], inbounds)["in"].ports == ()
