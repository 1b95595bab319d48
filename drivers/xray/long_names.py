"""Keep domain names of 255 bytes or more from the DNS of cores that panic over them. Pure.

Before 26.6.1 Xray's DNS does (`app/dns/dnscommon.go`). There a routing rule before all others sends such names to a
blackhole, and the DNS answers that they do not exist. The second is for names that no rule sees: of datagrams to
another name within a session, and the requested name where rules match a sniffed one.
"""

from __future__ import annotations

from drivers.xray.messages import BLACKHOLE, DNS, OURS, Version, field
from protos.xray_pb2 import Config, OutboundHandlerConfig, TypedMessage

FIXED_IN: Version = (26, 6, 1)
WARNING = (
    "one request of a user can crash this Xray ({}); the node blocks those requests that it knows. Get a safer core: "
    "`nodectl core update xray`"
)
_OUTBOUND = f"{OURS}guard"
# The form of the node's own rules, which controllers never see.
_RULE_TAG = f"{OURS}rule-guard"
# The expression counts characters, the DNS bytes; only sniffed names have characters of several bytes.
_TOO_LONG = rb"(?s)^.{254}|[^\x00-\x7F].{31}|.{31}[^\x00-\x7F]"
_NO_SUCH_NAME = b"#3"
# From this version on both messages wrap the domain in another one (common/geodata).
_GEODATA = (26, 4, 13)


def protect(base: Config, version: Version) -> bytes:
    """Add a blackhole outbound, and answers of the DNS for such names, if this version needs them.

    Returns router settings with the first rule, to put before the others; empty for a core without the fault.
    """
    if version >= FIXED_IN:
        return b""
    hosts = _host(version)
    for app in base.app:
        if app.type == DNS:
            app.value += hosts
    base.outbound.append(OutboundHandlerConfig(tag=_OUTBOUND, proxy_settings=TypedMessage(type=BLACKHOLE)))
    return _rule(version)


def _rule(version: Version) -> bytes:
    """RouterConfig.rule: tag = 1, domain = 2 (Domain: type = 1, Regex is 1; value = 2), rule_tag = 19."""
    domain = field(b"\x12", _domain(version))
    return field(b"\x12", field(b"\x0a", _OUTBOUND.encode()) + domain + field(b"\x9a\x01", _RULE_TAG.encode()))


def _host(version: Version) -> bytes:
    """Config.static_hosts of the DNS: type = 1, Regex is 3, and domain = 2; proxied_domain = 4."""
    old = version < _GEODATA
    name = b"\x08\x03" + field(b"\x12", _TOO_LONG) if old else field(b"\x12", _domain(version))
    return field(b"\x22", name + field(b"\x22", _NO_SUCH_NAME))


def _domain(version: Version) -> bytes:
    """A Domain; from `_GEODATA` on within a DomainRule, whose custom = 2."""
    domain = b"\x08\x01" + field(b"\x12", _TOO_LONG)
    return domain if version < _GEODATA else field(b"\x12", domain)
