"""The allowlist of Xray features (apps, protocols, transports), by the types in a converted configuration. Pure.

Names: the third part of types such as `xray.proxy.vless.inbound.Config`, Xray-core 26.3.27 to 26.10.21.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from drivers.process.allowlist import Allowed
from drivers.xray import text
from drivers.xray.messages import Version
from drivers.xray.streams import handlers_of, place_of, stream_of, with_downloads
from node.base.errors import InvalidConfig
from protos.xray_pb2 import Config, GeodataConfig, InboundHandlerConfig

APPS = (
    *("dispatcher", "proxyman", "log", "policy", "stats", "router", "dns", "observatory", "reverse", "version"),
    # The node removes both.
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
# By their name in a stream; raw TCP needs none.
TRANSPORTS = (
    *("", "tcp", "udp", "mkcp", "websocket", "grpc", "httpupgrade", "splithttp", "hysteria", "masque"),
    # Removed from newer cores, which say so better than the node could.
    *("quic", "http", "domainsocket"),
)
SECURITIES = ("", "none", "tls", "reality")

# Why some others are refused, by name.
DANGERS: Mapping[str, str] = {
    "tun": "it changes the routes of the machine",
    "geodata": "its assets would be written to the directory of geo files that all configurations share",
    "env": "it changes only the environment of the core's converter",
}
_NAME = re.compile(r"xray\.(?:core\.)?(?:app|proxy|transport\.internet)\.([a-z0-9_]+)\.")
# The last version whose converter does not take environment variables from the configuration.
_NO_ENVIRONMENT: Version = (26, 3, 27)


def judge(base: Config, source: str, version: Version, allowed: Allowed) -> None:
    """Raises `InvalidConfig` for the first part neither known nor allowed. `source` is the controller's text."""
    _judge_environment(source, version, allowed)
    for name, where, known in _things(base):
        allowed.judge(name, where, known, DANGERS)


def _judge_environment(source: str, version: Version, allowed: Allowed) -> None:
    """Check for `env`, which acts during the conversion only; a text that the node cannot parse may have it."""
    keys = text.top(source)
    if keys is None and version > _NO_ENVIRONMENT:
        raise InvalidConfig("the node cannot parse this configuration: is it JSON, and not nested deeply?")
    if "env" in (keys or ()):
        allowed.judge("env", "the configuration", (), DANGERS)


def _things(base: Config) -> Iterator[tuple[str, str, Collection[str]]]:
    """An object with a type: its name, its place, and the names known there."""
    for app in base.app:
        name = name_of(app.type)
        if name == "geodata" and not GeodataConfig.FromString(app.value).assets:
            continue  # without assets it only reloads the geo files
        yield name, "the configuration", APPS
    for handler in handlers_of(base):
        where, is_inbound = place_of(handler), isinstance(handler, InboundHandlerConfig)
        yield name_of(handler.proxy_settings.type), where, INBOUNDS if is_inbound else OUTBOUNDS
        for stream in with_downloads(stream_of(handler)):
            yield stream.protocol_name, f"{where}, transport", TRANSPORTS
            yield name_of(stream.security_type), f"{where}, security", SECURITIES


def name_of(type_name: str) -> str:
    """The short name of a type, such as `vless`; an unusual one is returned as it is."""
    match = _NAME.match(type_name)
    return match[1] if match else type_name
