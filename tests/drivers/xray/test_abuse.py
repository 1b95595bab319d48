"""What ABUSE adds to a configuration, on messages of the real core, which accepts them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.process.allowlist import NOTHING_MORE
from drivers.xray import abuse, rules
from drivers.xray.access import parse
from drivers.xray.config import HYSTERIA_MISCOUNTED, Plan, plan, render, rerouted
from drivers.xray.generation import own_counters
from node.contract.abuse import AbuseRules as Rules
from node.contract.abuse import Action, Kind, Rule
from node.contract.accounts import Accounts
from node.contract.routing import Added, Routing
from protos.xray_pb2 import Config, FreedomConfig, ReceiverConfig, RouterConfig, RoutingRule, SenderConfig
from scripts.staging.core import Json, xray_number
from tests.drivers.xray.test_guard import API
from tests.harness.convert import accepts, convert
from tests.harness.rendering import vless

TELL, BLOCK = Rule(Action.TELL), Rule(Action.BLOCK)
NO_USERS: Mapping[str, Accounts] = {"in": {}, "other": {}}
PARTS: Json = {
    "outbounds": [
        {"protocol": "freedom", "tag": "direct"},
        {"protocol": "blackhole", "tag": "block"},
        {"protocol": "freedom", "tag": "warp"},
    ],
    "routing": {
        "balancers": [{"tag": "b", "selector": ["warp", ""]}],
        "rules": [
            {"ip": ["10.0.0.0/8"], "outboundTag": "block"},
            {"protocol": ["bittorrent"], "outboundTag": "block"},
            {"protocol": ["tls"], "outboundTag": "warp"},
            {"domain": ["example.com"], "outboundTag": "warp"},
            {"inboundTag": ["other"], "outboundTag": "warp"},
            {"port": "7000", "balancerTag": "b"},
            {"inboundTag": ["in", "other"], "user": ["anna"], "outboundTag": "warp", "ruleTag": "hers"},
        ],
    },
}


def made(wanted: Rules, version: tuple[int, ...] = HYSTERIA_MISCOUNTED, **parts: Any) -> Plan:
    """The plan of a configuration with the inbounds `in` and `other`, of which the latter sniffs."""
    sniffing = {"enabled": True, "destOverride": ["http"], "routeOnly": False}
    inbounds = [vless("in"), {**vless("other"), "port": 1001, "sniffing": sniffing}]
    text = json.dumps({"inbounds": inbounds, **PARTS, **parts})
    return plan(
        convert(text), text, frozenset(), version, NOTHING_MORE, against=wanted, anywhere=convert(abuse.ANYWHERE)
    )


def rules_of(made: Plan) -> list[RoutingRule]:
    """All rules, with those for the API."""
    return list(RouterConfig.FromString(rules.router_app(message(made)).value).rule)


def shown(made: Plan, rule: RoutingRule) -> str:
    """The tag of the outbound to which a rule leads."""
    return made.abuse.outbound(rule.tag) or rule.tag


def sniffing(made: Plan, tag: str) -> tuple[bool, bool]:
    handler = next(handler for handler in made.base.inbound if handler.tag == tag)
    found = ReceiverConfig.FromString(handler.receiver_settings.value).sniffing_settings
    return found.enabled, found.route_only


def message(made: Plan) -> Config:
    return Config.FromString(render(made, API, NO_USERS))


@pytest.mark.core
def test_without_rules_nothing_changes() -> None:
    """Byte for byte what is rendered without ABUSE, also with sniffing allowed, and for `off`."""
    plain = made(Rules())
    for wanted in (Rules(sniffs=True), Rules({Kind.TORRENT: Rule(Action.OFF)}, exempt=frozenset({"anna"}))):
        other = made(wanted)
        assert render(other, API, NO_USERS) == render(plain, API, NO_USERS)
        assert (other.warnings, other.shown, other.abuse) == (plain.warnings, plain.shown, abuse.NOTHING)
    assert "~txnode-torrent" not in str(message(plain)) and plain.shown.renamed is None


@pytest.mark.core
def test_scans_add_nothing() -> None:
    """They are found in what the core tells anyway; so is mail that is not blocked."""
    wanted = Rules({Kind.SCAN: Rule(Action.CUT, 60), Kind.MAIL: TELL}, sniffs=True)
    assert render(made(wanted), API, NO_USERS) == render(made(Rules()), API, NO_USERS)


@pytest.mark.core
def test_blocked() -> None:
    """By rules before all others that lead to blackholes; exempt users pass."""
    wanted = Rules({Kind.TORRENT: BLOCK, Kind.MAIL: BLOCK}, {"other": {Kind.MAIL: TELL}}, frozenset({"anna"}))
    found = made(wanted, version=(26, 6, 1))
    first, second, third, *others = rules_of(found)
    assert [rule.tag for rule in (first, second, third)] == ["~txnode-torrent", "~txnode-mail", "~txnode-torrent"]
    assert [list(rule.inbound_tag) for rule in (first, second, third)] == [["in", "other"], ["in"], ["in", "other"]]
    assert [(some.first, some.last) for some in second.port_list.range] == [(25, 25)]
    assert list(third.protocol) == ["bittorrent"]
    assert all(rules.is_own(rule.rule_tag) for rule in (first, second, third))
    users = [pattern.removeprefix("regexp:") for pattern in third.user_email]
    assert [bool(re.search(users[0], name)) for name in ("anna", "ANNA", "anna2", "bert")] == [False, False, True, True]
    assert not any("txnode-torrent" in rule.tag for rule in others)
    added = [outbound.tag for outbound in found.base.outbound][3:]
    assert added == ["~txnode-torrent", "~txnode-mail"]
    assert {f"outbound>>>{tag}>>>traffic>>>uplink" for tag in added} <= set(own_counters(API, found.base.outbound))
    (lacking,) = found.abuse.warnings
    assert lacking in found.warnings and len(found.abuse.notes) == 2
    assert "ABUSE_SNIFFING" in lacking and "'in'" in lacking and "'other'" not in lacking


@pytest.mark.core
def test_reported() -> None:
    """Before each rule that a torrent can match a copy that leads to the same place, and one for the default."""
    found = made(Rules({Kind.TORRENT: TELL}, {"other": {Kind.TORRENT: Rule(Action.OFF)}}, sniffs=True))
    assert sniffing(found, "in") == (True, True)
    assert sniffing(found, "other") == (True, False)
    all_rules = rules.rules_of(found.base)
    torrent = ["bittorrent"]
    assert [(shown(found, rule), list(rule.protocol)) for rule in all_rules] == [
        ("block", torrent),
        ("block", []),
        ("block", torrent),
        ("block", torrent),
        ("warp", ["tls"]),
        ("warp", []),
        ("warp", []),
        ("", []),
        ("warp", torrent),
        ("warp", []),
        ("direct", torrent),
    ]
    copies = [rule for rule in all_rules if rule.tag.startswith("~")]
    assert all(list(rule.inbound_tag) == ["in"] and rules.is_own(rule.rule_tag) for rule in copies)
    assert [list(rule.user_email) for rule in copies] == [[], [], ["anna"], []]
    assert len({rule.rule_tag for rule in all_rules}) == len(all_rules)
    passing = {
        outbound.tag: SenderConfig.FromString(outbound.sender_settings.value).proxy_settings.tag
        for outbound in found.base.outbound[3:]
        if outbound.tag.startswith("~txnode-torrent")
    }
    assert {tag: found.abuse.outbound(tag) for tag in passing} == passing
    assert set(passing.values()) == {"direct", "block", "warp"}
    settings = [outbound.proxy_settings.value for outbound in found.base.outbound if outbound.tag in passing]
    assert all(FreedomConfig.FromString(value).final_rules for value in settings)
    assert any("balancer" in warning for warning in found.warnings)
    balancing = RouterConfig.FromString(rules.router_app(found.base).value).balancing_rule
    assert not any("~" in selector for some in balancing for selector in some.outbound_selector)
    assert rules.outbounds_of(found.base) == ["direct", "block", "warp"]


@pytest.mark.core
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"outbounds": [{"protocol": "freedom"}], "routing": {}},
        {"routing": {}},
        {"routing": {**PARTS["routing"], "domainStrategy": "IPIfNonMatch"}},
    ],
)
@pytest.mark.parametrize("rule", [TELL, BLOCK])
def test_the_core_takes_it(parts: Json, rule: Rule) -> None:
    """Also without rules, and without tags of outbounds."""
    wanted = Rules({Kind.TORRENT: rule, Kind.MAIL: BLOCK}, exempt=frozenset({"anna-x.y@z", "ö"}), sniffs=True)
    found = made(wanted, version=xray_number(), **parts)
    assert accepts(render(found, API, NO_USERS)) == ""


@pytest.mark.core
@pytest.mark.parametrize(("strategy", "only"), [("AsIs", False), ("IPOnDemand", False), ("IPIfNonMatch", True)])
def test_names_that_no_rule_matches(strategy: str, only: bool) -> None:
    """Where the core resolves them then, the last rule does not match them before."""
    found = made(Rules({Kind.TORRENT: TELL}), routing={**PARTS["routing"], "domainStrategy": strategy})
    *_, last = rules.rules_of(found.base)
    (anywhere,) = rules.rules_of(Config.FromString(convert(abuse.ANYWHERE)))
    assert (last.tag, list(last.protocol)) == ("~txnode-torrent-0", ["bittorrent"])
    assert (len(last.SerializeToString()) > anywhere.ByteSize()) is only


@pytest.mark.core
def test_rules_that_change() -> None:
    """New rules get copies, removed ones lose theirs, and the rule for the default outbound stays the last one."""
    found = made(Rules({Kind.TORRENT: TELL}))
    have = [rule.rule_tag for rule in rules.rules_of(found.base)]
    text = json.dumps({"routing": {"rules": [{"port": "9", "outboundTag": "warp", "ruleTag": "new"}]}})
    change = Routing(added=(Added("0123", json.dumps({})),), removed=frozenset({"hers"}))
    changed = rerouted(found, change, convert(text), text, HYSTERIA_MISCOUNTED)
    after = rules.rules_of(changed.base)
    assert [rules.public(rule.rule_tag) for rule in after[-3:]] == ["", "new", ""]
    assert [shown(found, rule) for rule in after[-3:]] == ["warp", "warp", "direct"]
    assert not any(rule.rule_tag == "hers" for rule in after)
    todo = rules.steps(have, after)
    assert [shown(found, rule) for rule in todo.appended] == ["warp", "warp", "direct"]
    assert set(todo.removed) == {have[-1], have[-2], have[-3]}
    assert rules.tags_of(changed.base) == {"new"}
    cleared = rerouted(found, Routing(cleared=True), b"", "", HYSTERIA_MISCOUNTED)
    assert [shown(found, rule) for rule in rules.rules_of(cleared.base)] == ["direct"]
    assert changed.first == found.first


def test_lines() -> None:
    """What is recognised in a line, and how the line is shown."""
    added = abuse.Added(passed={"direct": "~txnode-torrent-1", "a -> b": "~txnode-torrent-11"}, default="direct")
    for outbound, torrent, expected in (
        ("-> ~txnode-torrent-0", True, ">> direct"),
        ("-> ~txnode-torrent-1", True, "-> direct"),
        ("-> ~txnode-torrent-11", True, "-> a -> b"),
        ("-> ~txnode-torrent", True, "-> blocked"),
        ("-> ~txnode-mail", False, "-> blocked"),
        (">> direct", False, ">> direct"),
    ):
        line = f"2026/11/23 20:51:43.800895 from 1.2.3.4:5 accepted tcp:a.test:7000 [in {outbound}] email: anna"
        accepted = parse(line)
        assert accepted is not None and abuse.is_torrent(accepted.detour) is torrent
        assert added.shown(line) == line.replace(outbound, expected)


WORDS = st.sets(st.text("abx-.@[]^\\ $ö", min_size=1, max_size=6), min_size=1, max_size=6)


@given(WORDS, st.text("abxAB-.@[]^\\ $ö", min_size=1, max_size=7))
def test_all_names_but_some(keys: set[str], name: str) -> None:
    """The expression matches a name if it is none of these, in any case."""
    keys = {key.lower() for key in keys}
    expression = re.compile(abuse.others_than(keys))
    assert bool(expression.search(name)) is (name.lower() not in keys)
    assert not any(expression.search(key) or expression.search(key.upper()) for key in keys)
