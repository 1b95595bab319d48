"""Which parts a configuration of Xray may have, by the types that the core's converter gives them. Pure.

Names: the third part of types such as `xray.proxy.vless.inbound.Config`, Xray-core 26.3.27 to 26.10.21.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from drivers.process.known import Allowed
from drivers.xray import streams, text
from node.errors import InvalidConfig
from protos.xray_pb2 import Config, GeodataConfig, InboundHandlerConfig, OutboundHandlerConfig, StreamConfig

APPS = (
    *("dispatcher", "proxyman", "log", "policy", "stats", "router", "dns", "observatory", "reverse", "version"),
    # The node takes out both.
    *("commander", "metrics"),
)
INBOUNDS = (
    *("vless", "vmess", "trojan", "shadowsocks", "shadowsocks_2022", "hysteria", "wireguard", "masque"),
    *("socks", "http", "dokodemo"),
)
OUTBOUNDS = (
    *("vless", "vmess", "trojan", "shadowsocks", "shadowsocks_2022", "hysteria", "wireguard", "masque"),
    *("socks", "http", "freedom", "blackhole", "dns", "loopback"),
)
# By the name that a stream has for them; raw TCP needs none.
TRANSPORTS = (
    *("", "tcp", "udp", "mkcp", "websocket", "grpc", "httpupgrade", "splithttp", "hysteria", "masque"),
    # Some were removed from the core, which says so better than the node could.
    *("quic", "http", "domainsocket"),
)
SECURITIES = ("", "none", "tls", "reality")

# Why the others are refused, by name.
DANGERS: Mapping[str, str] = {
    "tun": "it changes the routes of the machine",
    "geodata": "its assets are written where the lists of all configurations are",
    "env": "it changes the environment of the core's converter, and of nothing else",
}
_NAME = re.compile(r"xray\.(?:core\.)?(?:app|proxy|transport\.internet)\.([a-z0-9_]+)\.")
# The first version whose converter has an environment from the configuration comes after this one.
_NO_ENVIRONMENT = (26, 3, 27)


def judge(base: Config, said: str, version: tuple[int, ...], allowed: Allowed) -> None:
    """Raises `InvalidConfig` for the first thing that is neither known nor allowed. `said` is the controller's text."""
    _judge_environment(said, version, allowed)
    for name, where, known in _things(base):
        allowed.judge(name, where, known, DANGERS)


def _judge_environment(said: str, version: tuple[int, ...], allowed: Allowed) -> None:
    """Its effect is over when the text was converted; a text that only the core can read may have it, too."""
    keys = text.top(said)
    if keys is None and version > _NO_ENVIRONMENT:
        raise InvalidConfig("the node cannot read this configuration: is it JSON, and not nested deeply?")
    if "env" in (keys or ()):
        allowed.judge("env", "the configuration", (), DANGERS)


def _things(base: Config) -> Iterator[tuple[str, str, Collection[str]]]:
    """Everything that has a type: its name, where it stands, and the names that are known there."""
    for app in base.app:
        name = name_of(app.type)
        if name == "geodata" and not GeodataConfig.FromString(app.value).assets:
            continue  # it only reads the lists again
        yield name, "the configuration", APPS
    for inbound in base.inbound:
        where = place("inbound", inbound)
        yield name_of(inbound.proxy_settings.type), where, INBOUNDS
        yield from _transports(streams.of_receiver(inbound), where)
    for outbound in base.outbound:
        where = place("outbound", outbound)
        yield name_of(outbound.proxy_settings.type), where, OUTBOUNDS
        yield from _transports(streams.of_sender(outbound), where)


def _transports(found: Iterator[StreamConfig], where: str) -> Iterator[tuple[str, str, Collection[str]]]:
    for stream in found:
        yield stream.protocol_name, f"{where}, transport", TRANSPORTS
        yield name_of(stream.security_type), f"{where}, security", SECURITIES


def name_of(type_name: str) -> str:
    """What operators call a type; one of an unusual form has no other name than its own."""
    match = _NAME.match(type_name)
    return match[1] if match else type_name


def place(kind: str, handler: InboundHandlerConfig | OutboundHandlerConfig) -> str:
    """Where something stands, in words."""
    return f"{kind} {handler.tag[:60]!r}"
