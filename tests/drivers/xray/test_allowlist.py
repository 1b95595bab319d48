"""Which features and unix sockets a configuration of Xray may have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivers.process.allowlist import Allowed
from drivers.process.paths import Paths
from drivers.xray.allowlist import OUTBOUNDS, name_of
from drivers.xray.config import Plan, plan
from node.base.errors import InvalidConfig
from protos import xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig, OutboundHandlerConfig, TypedMessage
from scripts.staging.core import Json
from tests.harness.convert import convert

pytestmark = pytest.mark.core

NEWER = (26, 9, 30)
INTERNET = "xray.transport.internet"
RUN = Path("/state/run")


def take_over(
    message: Config | Json, allow: str = "", said: str = "{}", version: tuple[int, ...] = (26, 3, 27)
) -> Plan:
    if isinstance(message, Config):
        made = message.SerializeToString()
    else:
        said = json.dumps(message)
        made = convert(said)
    allowed = Allowed(frozenset(allow.split(",")), Paths((Path("/run/front"),), (), RUN))
    return plan(made, said, frozenset(), version, allowed)


def inbound(
    type_: str = "xray.proxy.vless.inbound.Config", transport: str = "", security: str = ""
) -> InboundHandlerConfig:
    stream = xray_pb2.StreamConfig(protocol_name=transport, security_type=security)
    receiver = xray_pb2.ReceiverConfig(stream_settings=stream)
    return InboundHandlerConfig(
        tag="in",
        receiver_settings=TypedMessage(value=receiver.SerializeToString()),
        proxy_settings=TypedMessage(type=type_),
    )


def outbound(type_: str) -> OutboundHandlerConfig:
    return OutboundHandlerConfig(tag="out", proxy_settings=TypedMessage(type=type_))


def geodata(**more: object) -> Config:
    value = xray_pb2.GeodataConfig(**more).SerializeToString()  # type: ignore[arg-type]
    return Config(app=[TypedMessage(type="xray.app.geodata.Config", value=value)])


REFUSED = [
    (Config(app=[TypedMessage(type="xray.app.later.Config")]), "the configuration", "later"),
    (Config(app=[TypedMessage(type="later")]), "the configuration", "later"),
    (Config(inbound=[inbound("xray.proxy.tun.Config")]), "inbound 'in'", "tun"),
    (Config(inbound=[inbound("xray.proxy.later.Config")]), "inbound 'in'", "later"),
    (Config(inbound=[inbound(transport="later")]), "inbound 'in', transport", "later"),
    (
        Config(inbound=[inbound(security="xray.transport.internet.later.Config")]),
        "inbound 'in', security",
        "later",
    ),
    (Config(outbound=[outbound("xray.proxy.later.Config")]), "outbound 'out'", "later"),
    (geodata(assets=[b"x"]), "the configuration", "geodata"),
]


@pytest.mark.parametrize(("message", "where", "name"), REFUSED)
def test_what_is_refused_and_allowed(message: Config, where: str, name: str) -> None:
    """A feature is refused by name and place, unless the setting allows the name."""
    with pytest.raises(InvalidConfig) as told:
        take_over(message)
    assert str(told.value).startswith(f"{where}: {name} is refused, because ")
    assert f"CORE_ALLOW={name} " in str(told.value)
    take_over(message, name)


def test_a_download_transport_is_checked_too() -> None:
    """XHTTP has a download transport inside its settings."""
    back = xray_pb2.SplitHttpConfig(download_settings=xray_pb2.StreamConfig(protocol_name="later"))
    settings = TypedMessage(type="xray.transport.internet.splithttp.Config", value=back.SerializeToString())
    stream = xray_pb2.StreamConfig(transport_settings=[xray_pb2.TransportConfig(settings=settings)])
    sender = xray_pb2.SenderConfig(stream_settings=stream).SerializeToString()
    handler = outbound("xray.proxy.vless.outbound.Config")
    handler.sender_settings.value = sender
    with pytest.raises(InvalidConfig, match="outbound 'out', transport: later is refused"):
        take_over(Config(outbound=[handler]))


def test_a_tun_inbound_is_what_the_core_makes_of_one() -> None:
    with pytest.raises(InvalidConfig, match="inbound 'tun': tun is refused, because it changes the routes"):
        take_over({"inbounds": [{"protocol": "tun", "tag": "tun", "settings": {}}]})


def test_what_is_known_passes() -> None:
    """All that the core's converter makes of the usual configurations passes."""
    ss = {"servers": [{"address": "a.test", "port": 1, "method": "aes-128-gcm", "password": "x"}]}
    peer = {"servers": [{"address": "a.test", "port": 1}]}
    some: list[tuple[str, Json]] = [("freedom", {}), ("blackhole", {}), ("dns", {}), ("loopback", {"inboundTag": "in"})]
    some += [("http", peer), ("socks", peer), ("shadowsocks", ss)]
    networks = ("tcp", "ws", "grpc", "httpupgrade", "xhttp", "kcp")
    made = take_over(
        {
            "reverse": {"bridges": [{"tag": "bridge", "domain": "a.test"}]},
            "fakedns": [{"ipPool": "198.18.0.0/15", "poolSize": 10}],
            "observatory": {"subjectSelector": ["a"]},
            "burstObservatory": {"subjectSelector": ["a"], "pingConfig": {}},
            "version": {"min": "26.1"},
            "dns": {"servers": ["1.1.1.1"]},
            "api": {"tag": "api", "services": ["StatsService"]},
            "metrics": {"tag": "metrics"},
            "stats": {},
            "policy": {},
            "remarks": "mine",
            "inbounds": [
                *(
                    {
                        "tag": network,
                        "port": 1,
                        "protocol": "vless",
                        "settings": {"decryption": "none"},
                        "streamSettings": {"network": network},
                    }
                    for network in networks
                ),
                *({"tag": kind, "port": 1, "protocol": kind} for kind in ("socks", "http", "mixed")),
            ],
            "outbounds": [{"tag": name, "protocol": name, "settings": settings} for name, settings in some],
        }
    )
    assert len(made.base.app) > 9 and len(made.base.inbound) == 9


def test_what_newer_cores_have_passes() -> None:
    """A protocol of newer cores, the reload of geo files and unknown fields pass."""
    take_over(geodata(), version=NEWER)
    take_over(Config(inbound=[inbound("xray.proxy.masque.ServerConfig", transport="masque")]), version=NEWER)
    take_over(Config(outbound=[outbound(f"xray.proxy.{name}.Config") for name in OUTBOUNDS]), version=NEWER)


@pytest.mark.parametrize(
    "text",
    [
        '{"env": {"A": "b"}}',
        '// x\n{"ENV": {}} and more',
        '{"a": 1, "\\u0065nv": {}}',
        '{"n": %s, "env": {}}' % ("1" * 5000),
    ],
)
def test_an_environment_is_refused(text: str) -> None:
    """`env` is refused in any spelling; the core's message has nothing of it."""
    with pytest.raises(InvalidConfig, match="env is refused"):
        take_over(Config(), said=text)
    take_over(Config(), "env", text, NEWER)


def test_a_text_that_only_the_core_reads() -> None:
    """It may contain `env`, if this core supports that."""
    take_over(Config(), said="not to be read")
    with pytest.raises(InvalidConfig, match="cannot parse"):
        take_over(Config(), said="[" * 100_000, version=NEWER)


def test_a_message_of_another_meaning_is_refused() -> None:
    """A newer core may use a field number for another type."""
    odd = Config(app=[TypedMessage(type="xray.app.router.Config", value=b"\x12\x05odd")])
    with pytest.raises(InvalidConfig, match="cannot parse this configuration as the core converted it"):
        take_over(odd)


def test_users_that_are_not_the_nodes_are_parsed_at_once() -> None:
    """Those of an inbound without a tag are needed only later, beside a core that runs."""
    users = TypedMessage(type="xray.proxy.vless.inbound.Config", value=b"\x0a\x01\xff")
    with pytest.raises(InvalidConfig, match="cannot parse this configuration as the core converted it"):
        take_over(Config(inbound=[InboundHandlerConfig(proxy_settings=users)]))


def test_short_names_of_types() -> None:
    assert name_of("xray.proxy.vless.inbound.Config") == "vless"
    assert name_of("xray.core.app.observatory.burst.Config") == "observatory"
    assert name_of("xray.transport.internet.tls.Config") == "tls"
    assert name_of("evil.xray.app.dns.Config") == "evil.xray.app.dns.Config"


def served(fallback: Json) -> Json:
    settings = {"decryption": "none", "fallbacks": [fallback]}
    return {"inbounds": [{"tag": "in", "port": 1, "protocol": "vless", "settings": settings}]}


def reality(target: Json) -> Json:
    key = "2KZ4uouMKgI8nR-LDJNP1_MHisCJOmKGj9jUjZLncVU"
    stream = {
        "security": "reality",
        "realitySettings": {"serverNames": ["a"], "privateKey": key, "shortIds": [""], **target},
    }
    settings = {"decryption": "none"}
    return {"inbounds": [{"tag": "in", "port": 1, "protocol": "vless", "settings": settings, "streamSettings": stream}]}


def listening(address: str) -> Json:
    return {"inbounds": [{"tag": "in", "listen": address, "protocol": "vless", "settings": {"decryption": "none"}}]}


def webhook(url: str) -> Json:
    rule = {"domain": ["a.test"], "outboundTag": "out", "webhook": {"url": url}}
    return {"routing": {"rules": [rule]}, "outbounds": [{"tag": "out", "protocol": "freedom"}]}


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (listening("/run/x.sock"), "inbound 'in', listen"),
        (listening("/run/x.sock,0666"), "inbound 'in', listen"),
        (listening("/run/front/x,/../../x.sock,y"), "inbound 'in', listen"),
        (listening("@txnode-door"), "inbound 'in', listen"),
        (served({"dest": "/run/docker.sock"}), "inbound 'in', fallback"),
        (served({"dest": "run/docker.sock", "type": "unix"}), "inbound 'in', fallback"),
        (served({"dest": "@@txnode"}), "inbound 'in', fallback"),
        (reality({"target": "/run/docker.sock"}), "inbound 'in', REALITY's target"),
        (reality({"dest": "docker.sock", "type": "unix"}), "inbound 'in', REALITY's target"),
        (webhook("/run/docker.sock:/containers/create"), "routing rule 0, webhook"),
        (webhook("@txnode:/"), "routing rule 0, webhook"),
    ],
)
def test_a_socket_beyond_is_refused(message: Json, where: str) -> None:
    with pytest.raises(InvalidConfig) as told:
        take_over(message)
    assert str(told.value).startswith(f"{where}: ")


@pytest.mark.parametrize("address", ["/state/run/in.sock", "/run/front/in.sock", "@front", "@@front"])
def test_a_socket_in_its_place_passes(address: str) -> None:
    """TCP fallbacks and webhooks over HTTP pass, too."""
    for message in (listening(address), served({"dest": address}), reality({"target": address}), webhook(address)):
        take_over(message)
    take_over(listening(f"{address},0660"))
    for message in (served({"dest": 8080}), served({"dest": "127.0.0.1:1"}), webhook("https://a.test/x")):
        take_over(message)
