"""What of a configuration only one process at a time can have, or another one would have too late. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from drivers.process.exclusive import interface, wireguard
from drivers.xray.doors import is_http_3
from drivers.xray.selectors import portals
from protos import xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig, OutboundHandlerConfig

# By the type of their settings.
_KINDS = {"xray.proxy.tun.Config": interface, "xray.proxy.wireguard.DeviceConfig": wireguard}
_VLESS = "xray.proxy.vless.inbound.Config"


def exclusive(base: Config) -> Iterator[str]:
    """What that is, each in a line. The users of managed inbounds are none of it."""
    handlers: list[InboundHandlerConfig | OutboundHandlerConfig] = [*base.inbound, *base.outbound]
    for handler in handlers:
        kind = _KINDS.get(handler.proxy_settings.type)
        if kind is not None:
            yield kind(handler.tag)
    for tag in bridged(base):
        yield f"the bridges of the reverse proxy {tag!r} stay with the process that they are connected to"
    for handler in filter(is_http_3, base.inbound):
        # Xray's client does not hear that nobody is at the port, but it does hear the core's own farewell.
        yield f"clients of {handler.tag!r} (XHTTP by HTTP/3) would find another core after half a minute"


def bridged(base: Config) -> Iterator[str]:
    """The tags of reverse proxies: outbounds that no configuration lists."""
    yield from portals(base)
    for inbound in base.inbound:
        yield from _portals(inbound)


def _portals(inbound: InboundHandlerConfig) -> Iterator[str]:
    """The portals that users of VLESS are, by the tags of their reverse proxies."""
    if inbound.proxy_settings.type == _VLESS:
        for user in xray_pb2.UsersConfig.FromString(inbound.proxy_settings.value).users:
            account = xray_pb2.VlessAccount.FromString(user.account.value)
            if account.HasField("reverse"):
                yield account.reverse.tag
