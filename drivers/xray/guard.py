"""What keeps one request of a user from ending a core that has no defence of its own. Pure.

Before 26.6.1 Xray's DNS panics where it is asked for a name of 255 bytes or more (`app/dns/dnscommon.go`). Such names
lead nowhere there: a routing rule before all others takes them out, and the DNS answers that they do not exist. The
second is for what no rule sees: datagrams to another name within a session, and the name that was asked for where rules
look at a sniffed one.
"""

from __future__ import annotations

from drivers.install.releases import XRAY
from drivers.xray.selectors import OURS
from drivers.xray.wire import field
from protos.xray_pb2 import Config, OutboundHandlerConfig, TypedMessage

MENDED = (26, 6, 1)
WARNING = (
    "one request of a user can end this Xray ({}); the node keeps those that it knows from it. There is a safer core: "
    f"`python -m drivers.install --version {XRAY.version} xray`"
)
_DNS = "xray.app.dns.Config"
_BLACKHOLE = "xray.proxy.blackhole.Config"
_OUTBOUND = f"{OURS}guard"
# Of this form the node's own rules are, which controllers never see.
_RULE_TAG = f"{OURS}rule-guard"
# It counts characters, the DNS bytes; only sniffed names have such as take more than one.
_TOO_LONG = rb"(?s)^.{254}|[^\x00-\x7F].{31}|.{31}[^\x00-\x7F]"
_NO_SUCH_NAME = b"#3"
# From then on both messages have the domain in another one (common/geodata).
_GEODATA = (26, 4, 13)


def protect(base: Config, version: tuple[int, ...]) -> bytes:
    """Have the DNS know no such names, and an outbound that leads nowhere.

    Returns what to put before the router's own settings: the first rule. A core that needs none gets nothing.
    """
    if version >= MENDED:
        return b""
    hosts = _host(version)
    for app in base.app:
        if app.type == _DNS:
            app.value += hosts
    base.outbound.append(OutboundHandlerConfig(tag=_OUTBOUND, proxy_settings=TypedMessage(type=_BLACKHOLE)))
    return _rule(version)


def _rule(version: tuple[int, ...]) -> bytes:
    """RouterConfig.rule: tag = 1, domain = 2 (Domain: type = 1, Regex is 1; value = 2), rule_tag = 19."""
    domain = field(b"\x12", _domain(version))
    return field(b"\x12", field(b"\x0a", _OUTBOUND.encode()) + domain + field(b"\x9a\x01", _RULE_TAG.encode()))


def _host(version: tuple[int, ...]) -> bytes:
    """Config.static_hosts of the DNS: type = 1, Regex is 3, and domain = 2; proxied_domain = 4."""
    old = version < _GEODATA
    name = b"\x08\x03" + field(b"\x12", _TOO_LONG) if old else field(b"\x12", _domain(version))
    return field(b"\x22", name + field(b"\x22", _NO_SUCH_NAME))


def _domain(version: tuple[int, ...]) -> bytes:
    """A Domain; since then within a DomainRule, whose custom = 2."""
    domain = b"\x08\x01" + field(b"\x12", _TOO_LONG)
    return domain if version < _GEODATA else field(b"\x12", domain)
