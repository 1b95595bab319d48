"""What ABUSE adds to a configuration: rules, outbounds and sniffing. Pure.

What is blocked goes to a blackhole, by rules before all others. What is only reported goes where it went before: the
access line names the outbound that a rule chose, so before each rule there is a copy of it for BitTorrent alone, whose
outbound passes the connection on to that of the rule (`proxySettings`), and after all rules one for the default
outbound. Lists of domains are not copied: the peers of torrents are addresses. Where the core resolves a name only if
no rule matches (`IPIfNonMatch`), the last rule is for addresses alone, or it would keep names from rules for addresses.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from drivers.process.abuse import PROTOCOL, blocking_notes, listed
from drivers.xray import rules as routing
from drivers.xray.messages import FREEDOM, OURS, SENDER, edited
from drivers.xray.overrides import add_blackhole
from node.contract.abuse import MAIL_PORT, TORRENT_PORTS, AbuseRules, Kind
from protos.xray_pb2 import (
    Config,
    FreedomConfig,
    InboundHandlerConfig,
    OutboundHandlerConfig,
    PortList,
    PortRange,
    ReceiverConfig,
    RouterConfig,
    RoutingRule,
    SenderConfig,
    TypedMessage,
)

# The outbounds for torrents begin so: the blackhole, and with a number those that pass them on.
TORRENT, MAIL = f"{OURS}torrent", f"{OURS}mail"
DEFAULT = f"{TORRENT}-0"
# How access lines show the blackholes.
BLOCKED = "blocked"
# A configuration with a rule for all addresses, for the core to convert: their encoding depends on its version.
ANYWHERE = json.dumps(
    {"routing": {"rules": [{"ip": ["0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"], "outboundTag": TORRENT}]}}
)
_IP_IF_NON_MATCH = 2
_MARK = re.compile(rf"{TORRENT}-\d+|{TORRENT}|{MAIL}")
_COPY = "torrent-"
# A final rule that allows everything: the outbound that it leads to decides.
_ALLOWS = FreedomConfig(final_rules=[b""]).SerializeToString()
UNSNIFFED = (
    "ABUSE: inbounds whose configuration does not sniff contents recognise no torrents, except by behaviour and ports: "
    "{}; ABUSE_SNIFFING=on lets them"
)
BALANCED = "ABUSE: torrents that a balancer routes are only recognised by behaviour and ports"


@dataclass(frozen=True)
class Added:
    """What was added. `first`: router settings that go before all others. `notes` say what, `warnings` what is lacking.

    `passed`: by outbound the one that passes torrents on to it, from the inbounds `reported`; `DEFAULT` does for the
    default outbound, whose tag is `default`, where no rule of the configuration matches. `anywhere`: the rule of
    `ANYWHERE`.
    """

    first: bytes = b""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    reported: frozenset[str] = frozenset()
    passed: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    anywhere: bytes = b""

    def shown(self, line: str) -> str:
        """A line of the core's log as without ABUSE, but for what is blocked."""
        if TORRENT not in line and MAIL not in line:
            return line
        line = line.replace(f" -> {DEFAULT}]", f" >> {self.default}]")
        return _MARK.sub(lambda mark: self.outbound(mark[0]) or BLOCKED, line)

    def outbound(self, tag: str) -> str:
        """The outbound to which the one with this tag passes connections on; empty if it is none of these."""
        if tag == DEFAULT:
            return self.default
        return next((outbound for outbound, passing in self.passed.items() if passing == tag), "")


NOTHING = Added()


def add(base: Config, tags: Collection[str], wanted: AbuseRules, anywhere: bytes) -> Added:
    """Add to a configuration what ABUSE wants for the inbounds with these tags. `anywhere`: `ANYWHERE`, converted."""
    if not wanted:
        return NOTHING
    blocked, reported = wanted.blocked(Kind.TORRENT, tags), wanted.reported(Kind.TORRENT, tags)
    mail = wanted.blocked(Kind.MAIL, tags)
    rules = [*_blocking(TORRENT, blocked, wanted, TORRENT_PORTS), *_blocking(MAIL, mail, wanted, [MAIL_PORT])]
    if blocked:
        rules.append(_rule(TORRENT, blocked, wanted, protocol=[PROTOCOL]))
    for number, rule in enumerate(rules):
        rule.rule_tag = routing.own_tag(f"abuse-{number}")
    default = base.outbound[0].tag
    passed = _pass_on(base) if reported else {}
    for tag in dict.fromkeys(rule.tag for rule in rules):
        add_blackhole(base, tag)
    unsniffed = [
        handler.tag for handler in base.inbound if handler.tag in {*blocked, *reported} and not _sniffs(handler)
    ]
    if wanted.sniffs:
        unsniffed = [tag for tag in unsniffed if not _sniff(_inbound(base, tag))]
    balanced = any(rule.balancing_tag for rule in routing.rules_of(base))
    notes = [
        *blocking_notes(blocked, mail),
        *(f"ABUSE: the node adds rules that recognise torrents in {listed(some)}" for some in [reported] if some),
    ]
    warnings = [
        *(UNSNIFFED.format(listed(some)) for some in [unsniffed] if some),
        *([BALANCED] if balanced and reported else []),
    ]
    first = RouterConfig(rule=rules).SerializeToString()
    (rule,) = routing.rules_of(Config.FromString(anywhere)) or [RoutingRule()]
    everywhere = rule.SerializeToString()
    added = Added(first, tuple(notes), tuple(warnings), frozenset(reported), passed, default, everywhere)
    follow(base, added)
    return added


def follow(base: Config, added: Added) -> None:
    """Put a copy for torrents before each rule, and one after all; copies of rules that are gone are removed."""
    if not added.reported:
        return
    with edited(routing.router_app(base), RouterConfig) as router:
        kept = [rule for rule in router.rule if not rule.rule_tag.startswith(routing.own_tag(_COPY))]
        rules = [each for rule in kept for each in (*_copy(rule, added), rule)]
        default = RoutingRule.FromString(added.anywhere if router.domain_strategy == _IP_IF_NON_MATCH else b"")
        default.tag, default.inbound_tag[:], default.protocol[:] = DEFAULT, sorted(added.reported), [PROTOCOL]
        default.rule_tag = _copy_tag("", *(rule.rule_tag for rule in kept))
        del router.rule[:]
        router.rule.extend([*rules, default])


def outbounds(most: int) -> Iterator[str]:
    """The tags of all outbounds that may be added to a configuration with at most so many of its own."""
    yield from (TORRENT, MAIL, *(f"{TORRENT}-{number}" for number in range(most + 1)))


def is_torrent(detour: str) -> bool:
    """Whether an access line's route leads to an outbound for torrents."""
    return TORRENT in detour and detour.rpartition(" ")[2].startswith(TORRENT)


def others_than(keys: Iterable[str]) -> str:
    """A regular expression of all names but these, in any case; the core's engine knows no negation."""
    return f"(?is)^{_others({*keys})}$"


def _others(words: Collection[str]) -> str:
    firsts = sorted({word[0] for word in words if word})
    parts = [re.escape(first) + _others({word[1:] for word in words if word[:1] == first}) for first in firsts]
    if "" not in words:
        parts.append("")
    parts.append(f"[^{''.join(map(re.escape, firsts))}].*" if firsts else ".+")
    return f"(?:{'|'.join(parts)})"


def _blocking(tag: str, inbounds: list[str], wanted: AbuseRules, ports: Iterable[int]) -> Iterator[RoutingRule]:
    if inbounds:
        found = [PortRange(first=port, last=port) for port in sorted(ports)]
        yield _rule(tag, inbounds, wanted, port_list=PortList(range=found))


def _rule(tag: str, inbounds: list[str], wanted: AbuseRules, **what: object) -> RoutingRule:
    users = [f"regexp:{others_than(wanted.exempt)}"] if wanted.exempt else []
    return RoutingRule(tag=tag, inbound_tag=inbounds, user_email=users, **what)  # type: ignore[arg-type]


def _pass_on(base: Config) -> dict[str, str]:
    """Add for each outbound one that passes connections on to it. Returns their tags by those of the outbounds."""
    passed = {target: f"{TORRENT}-{number}" for number, target in enumerate(routing.outbounds_of(base), 1)}
    for target, tag in ((base.outbound[0].tag, DEFAULT), *passed.items()):
        sender = SenderConfig()
        sender.proxy_settings.tag = target
        base.outbound.append(
            OutboundHandlerConfig(
                tag=tag,
                sender_settings=TypedMessage(type=SENDER, value=sender.SerializeToString()),
                proxy_settings=TypedMessage(type=FREEDOM, value=_ALLOWS),
            )
        )
    return passed


def _copy(rule: RoutingRule, added: Added) -> Iterator[RoutingRule]:
    """The copy of a rule for torrents, if one can reach it."""
    inbounds = added.reported.intersection(rule.inbound_tag) if rule.inbound_tag else added.reported
    reached = not rule.protocol or any(PROTOCOL.startswith(each) for each in rule.protocol)
    if not inbounds or not reached or rule.domain or rule.tag not in added.passed:
        return
    copy = RoutingRule()
    copy.CopyFrom(rule)
    copy.tag, copy.rule_tag = added.passed[rule.tag], _copy_tag(rule.rule_tag)
    copy.inbound_tag[:], copy.protocol[:] = sorted(inbounds), [PROTOCOL]
    yield copy


def _copy_tag(*tags: str) -> str:
    return routing.own_tag(_COPY + hashlib.sha256("\n".join(tags).encode("utf-8", "surrogatepass")).hexdigest()[:16])


def _sniffs(handler: InboundHandlerConfig) -> bool:
    sniffing = ReceiverConfig.FromString(handler.receiver_settings.value).sniffing_settings
    return sniffing.enabled and not sniffing.metadata_only


def _sniff(handler: InboundHandlerConfig) -> bool:
    """Have an inbound sniff for the routing alone. Returns False for one that is to sniff metadata only."""
    with edited(handler.receiver_settings, ReceiverConfig) as receiver:
        if receiver.sniffing_settings.enabled:
            return False
        receiver.sniffing_settings.enabled = receiver.sniffing_settings.route_only = True
    return True


def _inbound(base: Config, tag: str) -> InboundHandlerConfig:
    return next(handler for handler in base.inbound if handler.tag == tag)
