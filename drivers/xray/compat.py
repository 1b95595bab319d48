"""Warn of settings that silently keep users out, depending on the core's version. Pure.

Type names and numbers: `transport/internet/{config,reality/config}.proto`, `proxy/freedom/config.proto` of Xray-core
26.7.28.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Container, Iterator

from drivers.xray import text
from drivers.xray.messages import FREEDOM, REALITY, Version, is_on_path, receiver_of
from protos import xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig

# The first versions that read `users` beside `clients`, that block private addresses in freedom outbounds, and that use
# X-Forwarded-For only where it is trusted.
USERS: Version = (26, 5, 9)
PRIVATE: Version = (26, 5, 3)
FORWARDED: Version = (26, 6, 22)
# The line that such a core logs then, for each connection.
UNTRUSTED = '"sockopt.trustedXForwardedFor" is not configured'
UNTRUSTED_SEEN = (
    "a reverse proxy sends X-Forwarded-For, which this core does not trust: users appear at the proxy's address; "
    'set "sockopt": {"trustedXForwardedFor": ["X-Forwarded-For"]} in the inbound'
)
_FORWARDED_FOR = "x-forwarded-for"
# The transports with that header. gRPC had another one, which no setting turns off.
FORWARDING = ("websocket", "httpupgrade", "splithttp")


def warnings(base: Config, source: str, version: Version) -> Iterator[str]:
    """The warnings for a configuration; `source` is the controller's text."""
    if "env" in (text.top(source) or ()):
        yield "`env` in the configuration has no effect on the core"
    for inbound in base.inbound:
        receiver = receiver_of(inbound)
        securities = [one.value for one in receiver.stream_settings.security_settings if one.type == REALITY]
        # The default of newer cores.
        if any(xray_pb2.RealityConfig.FromString(one).min_client_ver == bytes((26, 3, 27)) for one in securities):
            yield (
                f"inbound {inbound.tag!r}: REALITY accepts only clients of Xray 26.3.27 and newer and forwards others "
                '(sing-box, mihomo) to the target; set "minClientVer": "1.8.0" to accept all'
            )
        stream, named = receiver.stream_settings, receiver.stream_settings.socket_settings.trusted_x_forwarded_for
        if _FORWARDED_FOR in map(str.lower, named) and stream.protocol_name in FORWARDING and not is_local(receiver):
            yield (
                f"inbound {inbound.tag!r}: a client that connects directly chooses its own address by X-Forwarded-For; "
                "let it listen on loopback, or put a header that only your proxy sends into trustedXForwardedFor"
            )
        if not named and is_distrusted(stream, version) and is_local(receiver):
            yield (
                f"inbound {inbound.tag!r}: users behind a reverse proxy appear at the proxy's address; "
                'set "sockopt": {"trustedXForwardedFor": ["X-Forwarded-For"]}'
            )
    if version >= PRIVATE:
        for tag in _blocking(base, text.private_targets(source)):
            yield f"routing rules send private addresses to {tag!r}, which blocks them on this core without finalRules"


def unread_users(inbound: InboundHandlerConfig, hint: text.Hints, version: Version) -> str | None:
    """A warning if the core does not read the users of an inbound that is left as configured."""
    if not hint.renamed or version >= USERS:
        return None
    return f"inbound {inbound.tag!r}: this core reads `clients`, not `users`: the users listed there cannot connect"


def is_distrusted(stream: xray_pb2.StreamConfig, version: Version) -> bool:
    """Whether the core believes no forwarded address by this transport, unless the inbound says so."""
    return stream.protocol_name in FORWARDING or (stream.protocol_name == "grpc" and version >= FORWARDED)


def is_local(receiver: xray_pb2.ReceiverConfig) -> bool:
    """Whether only local programs can connect."""
    listen = receiver.listen
    is_loopback = len(listen.ip) in (4, 16) and ipaddress.ip_address(listen.ip).is_loopback
    return is_loopback or is_on_path(receiver)


def _blocking(base: Config, wanted: Container[str]) -> Iterator[str]:
    """The tags of the freedom outbounds among these that block private addresses."""
    for outbound in base.outbound:
        settings = outbound.proxy_settings
        rules = xray_pb2.FreedomConfig.FromString(settings.value).final_rules if settings.type == FREEDOM else [b""]
        if outbound.tag in wanted and not rules:
            yield outbound.tag
