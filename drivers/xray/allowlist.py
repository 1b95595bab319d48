"""What a configuration may have (apps, protocols, transports) and name (files and sockets): the rest is refused.

Files are looked for twice: in the controller's text, before the core's converter reads them, and in its output, where
names are canonical whatever the text looks like. Names: the third part of types such as
`xray.proxy.vless.inbound.Config`, Xray-core 26.3.27 to 26.10.21; `infra/conf/transport_internet.go`,
`transport/internet/{tls,hysteria}/config.proto` of 26.3.27.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from drivers.process.allowlist import Allowed
from drivers.process.confinement import Touched
from drivers.process.json_text import is_abstract, parse, texts
from drivers.process.paths import Paths
from drivers.xray import messages, text
from drivers.xray.messages import Version, handlers_of, place_of, receiver_of, stream_of, with_downloads
from node.base.errors import InvalidConfig
from protos import xray_pb2
from protos.xray_pb2 import Config, GeodataConfig, InboundHandlerConfig, StreamConfig

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
# Keys of the text, in lower case, whose values are files.
_KEYS = ("certificatefile", "keyfile")
# An `ext:FILE:LIST` entry: a list from another file in the directory of the geo files.
_LIST = re.compile(r"!?ext(?:-\w+)?:([^:]+):", re.IGNORECASE)
# How the address of a unix socket begins, where nothing else marks it.
_UNIX = ("/", "@")


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


class File(NamedTuple):
    """A file that a configuration names. `is_served`: the core serves it to any client."""

    place: str
    path: str
    is_served: bool = False


def touched(text: str, paths: Paths) -> Touched:
    """What the converter may touch for a controller's text. Raises `InvalidConfig` for a file that is not allowed."""
    try:
        tree = parse(text)
    except ValueError:
        return Touched()  # the converter may touch nothing
    for named in texts(tree):
        if named.key.lower() in _KEYS and named.text:
            paths.require(named.text, named.place)
        for listed in filter(None, map(_LIST.match, named.text.split(","))):
            _check_list(listed[1], named.place)
    # A mode may follow the path of a socket.
    listens = (named.text for named in texts(tree) if named.key.lower() == "listen" and named.text.startswith("/"))
    sockets = frozenset(text.split(",")[0] for text in listens)
    return Touched(paths.named_in(tree), sockets, abstract=is_abstract(tree))


def check(base: Config, paths: Paths, unconfined: str | None) -> None:
    """Check a converted configuration. Raises `InvalidConfig` for a file that is not allowed."""
    for file in named(base):
        if file.is_served and unconfined is not None:
            raise InvalidConfig(f"{file.place}: a core that is not confined may not serve a directory: {unconfined}")
        paths.require(file.path, file.place)


def named(base: Config) -> Iterator[File]:
    """Every file that the core reads while it runs."""
    for handler in handlers_of(base):
        yield from _of_stream(stream_of(handler), place_of(handler))


def _of_stream(stream: StreamConfig, place: str) -> Iterator[File]:
    for security in stream.security_settings:
        if security.type == messages.TLS:
            for certificate in xray_pb2.TlsConfig.FromString(security.value).certificate:
                some = {"certificateFile": certificate.certificate_path, "keyFile": certificate.key_path}
                yield from (File(f"{place}: {name}", path) for name, path in some.items() if path)
    for transport in stream.transport_settings:
        if transport.settings.type == messages.HYSTERIA:
            hysteria = xray_pb2.HysteriaTransportConfig.FromString(transport.settings.value)
            if hysteria.masq_type.lower() == "file":
                yield File(f"{place}: masquerade.dir", hysteria.masq_file, is_served=True)
        elif transport.settings.type == messages.SPLIT_HTTP:
            split = xray_pb2.SplitHttpConfig.FromString(transport.settings.value)
            yield from _of_stream(split.download_settings, f"{place}: downloadSettings")


def sockets(base: Config) -> Iterator[tuple[str, str]]:
    """The path or abstract name of each unix socket, and its place in the configuration.

    The core takes one as a listener, a fallback, messages.REALITY's target, or a rule's webhook.
    """
    for inbound in base.inbound:
        for address, what in _sockets_of(inbound):
            yield address, f"{place_of(inbound)}, {what}"
    for app in base.app:
        if app.type == messages.ROUTER:
            for number, rule in enumerate(xray_pb2.RouterConfig.FromString(app.value).rule):
                if rule.webhook.url.startswith(_UNIX):
                    yield rule.webhook.url.partition(":/")[0], f"routing rule {number}, webhook"


def _sockets_of(inbound: InboundHandlerConfig) -> Iterator[tuple[str, str]]:
    listen = receiver_of(inbound).listen.domain
    if listen.startswith(_UNIX):
        # A mode follows one comma; with several commas all belong to the path.
        path, *mode = listen.split(",")
        yield path if len(mode) == 1 else listen, "listen"
    if inbound.proxy_settings.type in (messages.VLESS, messages.TROJAN):
        for fallback in xray_pb2.FallbacksConfig.FromString(inbound.proxy_settings.value).fallbacks:
            if fallback.type.startswith("unix"):
                yield fallback.dest, "fallback"
    for stream in with_downloads(stream_of(inbound)):
        for security in stream.security_settings:
            if security.type == messages.REALITY:
                reality = xray_pb2.RealityConfig.FromString(security.value)
                if reality.type.startswith("unix"):
                    yield reality.dest, "REALITY's target"


def _check_list(name: str, place: str) -> None:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise InvalidConfig(f"{place}: {name!r} is not in the directory of the geo files (XRAY_ASSETS_PATH)")
