"""Find what keeps a second process from running the same configuration beside the first. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from drivers.process.exclusive import interface, wireguard
from drivers.xray.ingress import is_http_3
from drivers.xray.selectors import portals
from protos import xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig, OutboundHandlerConfig

# How to describe a handler that only one process can have, by the type of its settings.
_KINDS = {"xray.proxy.tun.Config": interface, "xray.proxy.wireguard.DeviceConfig": wireguard}
_VLESS = "xray.proxy.vless.inbound.Config"


def exclusive(base: Config, managed: Collection[str] = ()) -> Iterator[str]:
    """The reasons, one line each. The users and WireGuard keys of `managed` inbounds are none."""
    others = [inbound for inbound in base.inbound if inbound.tag not in managed]
    handlers: list[InboundHandlerConfig | OutboundHandlerConfig] = [*others, *base.outbound]
    for handler in handlers:
        kind = _KINDS.get(handler.proxy_settings.type)
        if kind is not None:
            yield kind(handler.tag)
    for tag in bridged(base):
        yield f"bridges of the reverse proxy {tag!r} stay connected to the old process"
    for handler in filter(is_http_3, base.inbound):
        # Xray's client does not notice an unreachable port, only the core's own goodbye.
        yield f"clients of {handler.tag!r} (XHTTP over HTTP/3) would reach a new core only after half a minute"


def bridged(base: Config) -> Iterator[str]:
    """The tags of reverse proxies, which act as outbounds but are not listed as such."""
    yield from portals(base)
    for inbound in base.inbound:
        yield from _portals(inbound)


def _portals(inbound: InboundHandlerConfig) -> Iterator[str]:
    """The tags of reverse proxies that VLESS users have."""
    if inbound.proxy_settings.type == _VLESS:
        for user in xray_pb2.UsersConfig.FromString(inbound.proxy_settings.value).users:
            account = xray_pb2.VlessAccount.FromString(user.account.value)
            if account.HasField("reverse"):
                yield account.reverse.tag
