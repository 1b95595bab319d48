"""Refuse configurations that name files which the operator does not allow, and find the sockets that they name.

Files are looked for twice: in the controller's text, before the core's converter reads them, and in its output, where
names are canonical whatever the text looks like. Names: `infra/conf/transport_internet.go`,
`transport/internet/{tls,hysteria}/config.proto` of Xray-core 26.3.27.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from drivers.process.confinement import Touched
from drivers.process.json_text import parse
from drivers.process.named_files import is_abstract, readable, texts
from drivers.process.paths import Paths
from drivers.xray.messages import HYSTERIA, REALITY, ROUTER, SPLIT_HTTP, TLS, TROJAN, VLESS
from drivers.xray.streams import handlers_of, place_of, receiver_of, stream_of, with_downloads
from node.base.errors import InvalidConfig
from protos import xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig, StreamConfig

_KEYS = ("certificatefile", "keyfile")
# An `ext:FILE:LIST` entry: a list from another file in the directory of the geo files.
_LIST = re.compile(r"!?ext(?:-\w+)?:([^:]+):", re.IGNORECASE)
# How the address of a unix socket begins, where nothing else marks it.
_UNIX = ("/", "@")


class File(NamedTuple):
    """A file that a configuration names. `is_served`: the core serves it to any client."""

    place: str
    path: str
    is_served: bool = False


def asked(text: str, paths: Paths) -> Touched:
    """Files that the converter may touch for a text. Raises `InvalidConfig` for a file that is not allowed."""
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
    return Touched(readable(tree, paths), sockets, abstract=is_abstract(tree))


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
        if security.type == TLS:
            for certificate in xray_pb2.TlsConfig.FromString(security.value).certificate:
                some = {"certificateFile": certificate.certificate_path, "keyFile": certificate.key_path}
                yield from (File(f"{place}: {name}", path) for name, path in some.items() if path)
    for transport in stream.transport_settings:
        if transport.settings.type == HYSTERIA:
            hysteria = xray_pb2.HysteriaTransportConfig.FromString(transport.settings.value)
            if hysteria.masq_type.lower() == "file":
                yield File(f"{place}: masquerade.dir", hysteria.masq_file, is_served=True)
        elif transport.settings.type == SPLIT_HTTP:
            split = xray_pb2.SplitHttpConfig.FromString(transport.settings.value)
            yield from _of_stream(split.download_settings, f"{place}: downloadSettings")


def sockets(base: Config) -> Iterator[tuple[str, str]]:
    """The path or abstract name of each unix socket, and its place in the configuration.

    The core takes one as a listener, a fallback, REALITY's target, or a rule's webhook.
    """
    for inbound in base.inbound:
        for address, what in _sockets_of(inbound):
            yield address, f"{place_of(inbound)}, {what}"
    for app in base.app:
        if app.type == ROUTER:
            for number, rule in enumerate(xray_pb2.RouterConfig.FromString(app.value).rule):
                if rule.webhook.url.startswith(_UNIX):
                    yield rule.webhook.url.partition(":/")[0], f"routing rule {number}, webhook"


def _sockets_of(inbound: InboundHandlerConfig) -> Iterator[tuple[str, str]]:
    listen = receiver_of(inbound).listen.domain
    if listen.startswith(_UNIX):
        # A mode follows one comma; with several commas all belong to the path.
        path, *mode = listen.split(",")
        yield path if len(mode) == 1 else listen, "listen"
    if inbound.proxy_settings.type in (VLESS, TROJAN):
        for fallback in xray_pb2.FallbacksConfig.FromString(inbound.proxy_settings.value).fallbacks:
            if fallback.type.startswith("unix"):
                yield fallback.dest, "fallback"
    for stream in with_downloads(stream_of(inbound)):
        for security in stream.security_settings:
            if security.type == REALITY:
                reality = xray_pb2.RealityConfig.FromString(security.value)
                if reality.type.startswith("unix"):
                    yield reality.dest, "REALITY's target"


def _check_list(name: str, place: str) -> None:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise InvalidConfig(f"{place}: {name!r} is not in the directory of the geo files (XRAY_ASSETS_PATH)")
