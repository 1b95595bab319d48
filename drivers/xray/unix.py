"""Find the unix sockets that a configuration listens on or connects to. Pure.

The core takes one as a listener, a fallback, REALITY's target, or a rule's webhook.
"""

from __future__ import annotations

from collections.abc import Iterator

from drivers.xray import streams
from drivers.xray.allowlist import place
from protos import xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig

_FALLBACKS = ("xray.proxy.vless.inbound.Config", "xray.proxy.trojan.ServerConfig")
_ROUTER = "xray.app.router.Config"
# How the address of a unix socket begins, where nothing else marks it.
_UNIX = ("/", "@")


def sockets(base: Config) -> Iterator[tuple[str, str]]:
    """The path or abstract name of each socket, and its place in the configuration."""
    for inbound in base.inbound:
        for address, what in _of(inbound):
            yield address, f"{place('inbound', inbound)}, {what}"
    for app in base.app:
        if app.type == _ROUTER:
            for number, rule in enumerate(xray_pb2.RouterConfig.FromString(app.value).rule):
                if rule.webhook.url.startswith(_UNIX):
                    yield rule.webhook.url.partition(":/")[0], f"routing rule {number}, webhook"


def _of(inbound: InboundHandlerConfig) -> Iterator[tuple[str, str]]:
    listen = xray_pb2.ReceiverConfig.FromString(inbound.receiver_settings.value).listen.domain
    if listen.startswith(_UNIX):
        # A mode follows one comma; with several commas all belong to the path.
        path, *mode = listen.split(",")
        yield path if len(mode) == 1 else listen, "listen"
    if inbound.proxy_settings.type in _FALLBACKS:
        for fallback in xray_pb2.FallbacksConfig.FromString(inbound.proxy_settings.value).fallbacks:
            if fallback.type.startswith("unix"):
                yield fallback.dest, "fallback"
    for stream in streams.of_receiver(inbound):
        for security in stream.security_settings:
            if security.type == streams.REALITY:
                reality = xray_pb2.RealityConfig.FromString(security.value)
                if reality.type.startswith("unix"):
                    yield reality.dest, "REALITY's target"
