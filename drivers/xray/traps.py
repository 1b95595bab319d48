"""What of a configuration keeps users out without a word of the core, by its version: for operators. Pure.

Type names and numbers: `transport/internet/{config,reality/config}.proto`, `proxy/freedom/config.proto` of Xray-core
26.7.28.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Container, Iterator

from drivers.xray import text
from drivers.xray.streams import REALITY
from protos import xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig

Version = tuple[int, ...]
# The first versions that have `users` beside `clients`, private addresses that a freedom outbound does not reach, and a
# header that only counts where it is trusted.
USERS: Version = (26, 5, 9)
PRIVATE: Version = (26, 5, 3)
FORWARDED: Version = (26, 6, 22)
# What such a core says then, for each connection.
UNTRUSTED = '"sockopt.trustedXForwardedFor" is not configured'
UNTRUSTED_SEEN = (
    "a reverse proxy says whom it speaks for in X-Forwarded-For, which this core does not believe: users are seen at "
    'the proxy\'s address; "sockopt": {"trustedXForwardedFor": ["X-Forwarded-For"]} in the inbound has it believed'
)
_FREEDOM = "xray.proxy.freedom.Config"
_TOLD = ("websocket", "httpupgrade", "splithttp", "grpc")
# What newer cores take where nothing is said.
_DEFAULT_CLIENT = bytes((26, 3, 27))


def traps(base: Config, said: str, version: Version) -> Iterator[str]:
    """What there is to warn of; `said` is the controller's text."""
    if "env" in (text.top(said) or ()):
        yield "env of the configuration has no effect on the core"
    for inbound in base.inbound:
        receiver = xray_pb2.ReceiverConfig.FromString(inbound.receiver_settings.value)
        if any(map(_is_strict, receiver.stream_settings.security_settings)):
            yield (
                f"inbound {inbound.tag!r}: its REALITY takes clients of Xray 26.3.27 and newer only, and passes others "
                '(sing-box, mihomo) on to the target: "minClientVer": "1.8.0" has it take all'
            )
        if version >= FORWARDED and _is_behind_a_proxy(receiver):
            yield (
                f"inbound {inbound.tag!r}: behind a reverse proxy its users are seen at the proxy's address without "
                '"sockopt": {"trustedXForwardedFor": ["X-Forwarded-For"]}, and not as online at one of loopback'
            )
    if version >= PRIVATE:
        for tag in _blocking(base, text.private_targets(said)):
            yield f"rules lead private addresses to {tag!r}, which reaches none on this core without finalRules"


def unread(inbound: InboundHandlerConfig, hint: text.Hints, version: Version) -> str | None:
    """Why the configuration's own users of an inbound that is left as it is do not get in."""
    if not hint.renamed or version >= USERS:
        return None
    return f"inbound {inbound.tag!r}: this core reads clients, not users: none of them gets in"


class Disbelief:
    """Whether a core said that it does not believe a reverse proxy. It says so for each connection."""

    told = False

    def again(self, line: str) -> bool:
        """Whether this line says it, and is not the first one."""
        if UNTRUSTED not in line:
            return False
        before, self.told = self.told, True
        return before

    @property
    def warnings(self) -> list[str]:
        return [UNTRUSTED_SEEN] if self.told else []


def _is_strict(security: xray_pb2.TypedMessage) -> bool:
    return security.type == REALITY and xray_pb2.RealityConfig.FromString(security.value).min_client_ver == (
        _DEFAULT_CLIENT
    )


def _is_behind_a_proxy(receiver: xray_pb2.ReceiverConfig) -> bool:
    """Whether only the machine's own programs come to it, by a transport that tells whom they speak for."""
    stream = receiver.stream_settings
    if stream.protocol_name not in _TOLD or stream.socket_settings.trusted_x_forwarded_for:
        return False
    listen = receiver.listen
    is_loopback = len(listen.ip) in (4, 16) and ipaddress.ip_address(listen.ip).is_loopback
    return is_loopback or listen.domain.startswith(("/", "@"))


def _blocking(base: Config, wanted: Container[str]) -> Iterator[str]:
    """The freedom outbounds among these that reach no private addresses."""
    for outbound in base.outbound:
        settings = outbound.proxy_settings
        rules = xray_pb2.FreedomConfig.FromString(settings.value).final_rules if settings.type == _FREEDOM else [b""]
        if outbound.tag in wanted and not rules:
            yield outbound.tag
