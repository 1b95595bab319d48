"""Override the apps of a configuration: counters on, logs to the console, its own APIs off, geo files reloaded. Pure.

And guard cores before 26.6.1 against a crash by a request of a user: there a routing rule before all others sends such
requests to a blackhole, and the DNS answers those that no rule sees. Numbers of fields: Xray-core 26.3.27.
"""

from __future__ import annotations

import secrets

from drivers.xray import messages
from drivers.xray.access import BadMask, Mask, Shown
from drivers.xray.compat import FORWARDED, FORWARDING
from drivers.xray.messages import Version, edited, field
from drivers.xray.text import names_lists
from node.base.errors import InvalidConfig
from protos import xray_pb2
from protos.xray_pb2 import Config, GeodataConfig, InboundHandlerConfig, OutboundHandlerConfig, TypedMessage

_CONSOLE = 1
# A header whose presence makes the core believe the client. No client can guess it.
SENT_BY_NO_CLIENT = f"X-{secrets.token_hex(16)}"
# The first version with the app that reloads geo files; older ones do not start with it.
RELOADS_SINCE: Version = (26, 4, 25)
# The first version that needs no guard.
SAFE_SINCE: Version = (26, 6, 1)
UNSAFE = (
    "one request of a user can crash this Xray ({}); the node blocks those requests that it knows. Get a safer core: "
    "`nodectl core update xray`"
)
# The blackhole outbound of the node's own rules.
BLACKHOLE = f"{messages.OURS}guard"
# The form of the node's own rules, which controllers never see.
_RULE_TAG = f"{messages.OURS}rule-guard"
# The names that the guard catches: all that the DNS cannot have, and some more.
_GUARDED = rb"(?s)^.{254}|[^\x00-\x7F].{31}|.{31}[^\x00-\x7F]"
NO_SUCH_NAME = "#3"
# From this version on both messages wrap the domain in another one (common/geodata).
GEODATA = (26, 4, 13)


def override(base: Config, count_inbounds: bool) -> Shown:
    """Turn counters on, send logs to the console and remove other APIs; all other apps stay as and where they are.

    Returns which lines the controller asked for.
    """
    kept = [app for app in base.app if app.type not in (messages.COMMANDER, messages.METRICS)]
    del base.app[:]
    base.app.extend(kept)
    with edited(_app(base, messages.LOG), xray_pb2.LogConfig) as log:
        shown = _override_log(log)
    with edited(_app(base, messages.POLICY), xray_pb2.PolicyConfig) as policy:
        _count(policy, count_inbounds)
    for needed in (messages.ROUTER, messages.STATS):
        _app(base, needed)
    return shown


def distrust_forwarded(inbound: InboundHandlerConfig, version: Version) -> None:
    """Have older cores believe no X-Forwarded-For in an inbound that names no trusted header, as newer ones do."""
    if version < FORWARDED:
        with edited(inbound.receiver_settings, xray_pb2.ReceiverConfig) as receiver:
            stream = receiver.stream_settings
            if stream.protocol_name in FORWARDING and not stream.socket_settings.trusted_x_forwarded_for:
                stream.socket_settings.trusted_x_forwarded_for.append(SENT_BY_NO_CLIENT)


def use_single_path(inbound: InboundHandlerConfig) -> bool:
    """Turn Multipath TCP off, whose sockets the kernel neither steers nor paces. Returns whether it was on."""
    with edited(inbound.receiver_settings, xray_pb2.ReceiverConfig) as receiver:
        stream = receiver.stream_settings
        was = stream.socket_settings.tcp_mptcp
        if was:
            stream.socket_settings.tcp_mptcp = False
    return was


def have_reloaded(base: Config, source: str, version: Version) -> None:
    """Have the core reload geo files that an operator replaces, if it can and `source` (the text) names any.

    Its geodata app without assets reads the local files again (`app/geodata` of Xray-core 26.7.28): all that are in
    use, changed or not, which takes most of a second with the usual files. No API call triggers it, and the core does
    not watch the files. If a file cannot be read the former lists stay in force. A configuration with its own geodata
    app stays as it is.
    """
    if version >= RELOADS_SINCE and not any(app.type == messages.GEODATA for app in base.app) and names_lists(source):
        base.app.append(TypedMessage(type=messages.GEODATA, value=GeodataConfig(cron="@every 1h").SerializeToString()))


def are_reloaded(base: Config) -> bool:
    """Whether a core with this configuration reloads its geo files while it runs."""
    return any(app.type == messages.GEODATA and GeodataConfig.FromString(app.value).cron for app in base.app)


def _app(base: Config, type_name: str) -> TypedMessage:
    """The app of this type; a missing one is added."""
    return next((app for app in base.app if app.type == type_name), None) or base.app.add(type=type_name)


def _override_log(log: xray_pb2.LogConfig) -> Shown:
    """Send logs to the console, so that the core writes no file that a controller names.

    Access lines are always on and unmasked: the node attributes connections by them.
    """
    try:
        shown = Shown(bool(log.access_log_type), Mask.of(log.mask_address))
    except BadMask as error:
        raise InvalidConfig(str(error)) from error
    log.error_log_path = log.access_log_path = log.mask_address = ""
    log.error_log_type = _CONSOLE if log.error_log_type else 0
    log.access_log_type = _CONSOLE
    # Lines about the messages.DNS are access lines, too.
    log.enable_dns_log = log.enable_dns_log and shown.access
    return shown


def _count(policy: xray_pb2.PolicyConfig, inbounds: bool) -> None:
    for level in {0, *policy.level}:
        stats = policy.level[level].stats
        stats.user_uplink = stats.user_downlink = stats.user_online = True
    system = policy.system.stats
    system.inbound_uplink = system.inbound_downlink = inbounds
    system.outbound_uplink = system.outbound_downlink = True


def add_guard(base: Config, version: Version) -> bytes:
    """Add a blackhole outbound, and answers of the DNS, if this version needs the guard.

    Returns router settings with the first rule, to put before the others; empty for a core without the fault.
    """
    if version >= SAFE_SINCE:
        return b""
    hosts = _host(version)
    for app in base.app:
        if app.type == messages.DNS:
            app.value += hosts
    add_blackhole(base)
    return _rule(version)


def add_blackhole(base: Config, tag: str = BLACKHOLE) -> None:
    """Add a blackhole outbound with this tag if it is missing."""
    if not any(outbound.tag == tag for outbound in base.outbound):
        base.outbound.append(OutboundHandlerConfig(tag=tag, proxy_settings=TypedMessage(type=messages.BLACKHOLE)))


def _rule(version: Version) -> bytes:
    """RouterConfig.rule: tag = 1, domain = 2 (Domain: type = 1, Regex is 1; value = 2), rule_tag = 19."""
    domain = field(b"\x12", _domain(version))
    return field(b"\x12", field(b"\x0a", BLACKHOLE.encode()) + domain + field(b"\x9a\x01", _RULE_TAG.encode()))


def _host(version: Version) -> bytes:
    """Config.static_hosts of the messages.DNS: type = 1, Regex is 3, and domain = 2; proxied_domain = 4."""
    old = version < GEODATA
    name = b"\x08\x03" + field(b"\x12", _GUARDED) if old else field(b"\x12", _domain(version))
    return field(b"\x22", name + field(b"\x22", NO_SUCH_NAME.encode()))


def _domain(version: Version) -> bytes:
    return domain_rule(b"\x08\x01", _GUARDED, version)


def domain_rule(kind: bytes, value: bytes, version: Version) -> bytes:
    """A Domain, with its encoded type; from `GEODATA` on within a DomainRule, whose custom = 2."""
    domain = kind + field(b"\x12", value)
    return domain if version < GEODATA else field(b"\x12", domain)
