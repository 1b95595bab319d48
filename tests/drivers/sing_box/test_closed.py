"""The rules that keep users of sing-box from the server: where the node puts them, and what they leave alone."""

from __future__ import annotations

from typing import Any

from drivers.process.closed import Closed
from drivers.sing_box.closed import close

CLOSED = Closed(("127.0.0.0/8",), ("192.0.2.10",), (62050,), interface="eth0")
NETWORKS = ["127.0.0.0/8", "::ffff:127.0.0.0/104"]
REJECT: dict[str, Any] = {"ip_cidr": NETWORKS, "action": "reject"}
# Targets with a zone.
ZONED = {
    "type": "logical",
    "mode": "and",
    "rules": [
        {"type": "logical", "mode": "or", "rules": [{"ip_version": 4}, {"ip_version": 6}]},
        {"ip_cidr": ["0.0.0.0/0", "::/0"], "invert": True},
    ],
}
REJECT_ZONED = {**ZONED, "action": "reject"}
REJECT_PORTS = {"ip_cidr": ["192.0.2.10", "::ffff:192.0.2.10/128"], "port": [62050], "action": "reject"}
DIRECT = {"type": "direct", "tag": "direct"}
PROXY = {"type": "socks", "tag": "warp", "server": "127.0.0.1", "server_port": 40000}


def rules(*own: dict[str, Any], closed: Closed = CLOSED, **tree: Any) -> list[dict[str, Any]]:
    tree = {"outbounds": [dict(DIRECT), dict(PROXY)], **tree}
    tree["route"] = {"rules": [*own], **tree.get("route", {})}
    close(tree, closed)
    found: list[dict[str, Any]] = tree["route"]["rules"]
    return found


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {"type": "logical", "mode": "and", "rules": [one, other], "action": "reject"}


def test_by_default() -> None:
    """Addresses first; names only at the end, where they leave by the direct outbound."""
    rejects = [REJECT, REJECT_ZONED, REJECT_PORTS]
    assert rules() == [*rejects, {"action": "resolve"}, *rejects]


def test_a_proxy_resolves_by_itself() -> None:
    """Names that another proxy resolves do not become known to this machine's DNS."""
    own = {"domain": ["a.test"], "outbound": "warp"}
    assert rules(own, route={"final": "warp"}) == [REJECT, REJECT_ZONED, REJECT_PORTS, own]


def test_before_a_rule_to_direct() -> None:
    own = {"domain": ["a.test"], "outbound": "direct", "tls_fragment": True}
    added = rules(own, route={"final": "warp"})[3:]
    condition = {"domain": ["a.test"]}
    assert added == [
        {**condition, "action": "resolve"},
        _both(condition, {"ip_cidr": NETWORKS}),
        _both(condition, ZONED),
        _both(condition, {key: REJECT_PORTS[key] for key in ("ip_cidr", "port")}),
        own,
    ]


def test_other_actions_stay() -> None:
    """The node resolves nothing for rules that decide no way, or that have a target of their own."""
    sniff, hijack = {"action": "sniff"}, {"protocol": "dns", "action": "hijack-dns"}
    fixed = {"port": [80], "outbound": "direct", "override_address": "127.0.0.1"}
    found = rules(sniff, hijack, fixed, route={"final": "warp"})
    assert found == [REJECT, REJECT_ZONED, REJECT_PORTS, sniff, hijack, fixed]


def test_bypass() -> None:
    """Without a transparent proxy this action leads to its outbound."""
    own = {"domain": ["a.test"], "action": "bypass", "outbound": "direct"}
    assert rules(own, route={"final": "warp"})[3] == {"domain": ["a.test"], "action": "resolve"}


def test_all_conditions() -> None:
    """A condition that is left out would make another rule, with `invert` a narrower one."""
    condition = {"domain": ["a.test"], "network_type": ["wifi"], "wifi_bssid": ["x"], "invert": True}
    found = rules({**condition, "outbound": "direct"}, route={"final": "warp"})
    assert found[3] == {**condition, "action": "resolve"}


def test_groups() -> None:
    """A group with a direct outbound, also within another group, counts as direct."""
    groups = [
        {"type": "selector", "tag": "outer", "outbounds": ["inner"]},
        {"type": "urltest", "tag": "inner", "outbounds": ["warp", "direct"]},
    ]
    found = rules(outbounds=[*groups, dict(DIRECT), dict(PROXY)])
    assert {"action": "resolve"} in found
    assert {"action": "resolve"} in rules(outbounds=[{**DIRECT, "tag": "by", "detour": "direct"}, dict(DIRECT)])


def test_the_resolver() -> None:
    """The core resolves by the outbound's own resolver, else by the common one."""
    own = {**DIRECT, "domain_resolver": {"server": "dns", "strategy": "ipv4_only", "detour": "x"}}
    assert {"action": "resolve", "server": "dns", "strategy": "ipv4_only"} in rules(outbounds=[own])
    assert {"action": "resolve", "server": "all"} in rules(route={"default_domain_resolver": "all"})


def test_fixed_targets() -> None:
    """Clients of a direct inbound do not choose the target."""
    first = rules(inbounds=[{"type": "direct", "tag": "web"}, {"type": "vless", "tag": "in"}])[0]
    others = {"inbound": ["web"], "invert": True}
    assert first == {"type": "logical", "mode": "and", "rules": [{"ip_cidr": NETWORKS}, others], "action": "reject"}


def test_own_rules_first() -> None:
    """With `rules`, what the configuration names on purpose comes first, and nothing else."""
    yields = Closed(CLOSED.networks, yields=True)
    every = {"port": [443], "outbound": "direct"}
    named = {"ip_cidr": ["127.0.0.9"], "outbound": "direct"}
    found = rules(every, named, closed=yields, route={"final": "warp"})
    condition = {"port": [443]}
    rejects = [_both(condition, {"ip_cidr": NETWORKS}), _both(condition, ZONED)]
    assert found == [{**condition, "action": "resolve"}, *rejects, every, named, REJECT, REJECT_ZONED]


def test_udp_over_tcp() -> None:
    """Its first version has 0.0.0.0:0 as the target of a session."""
    found = rules(closed=Closed(("127.0.0.0/8", "0.0.0.0/8")))
    assert found[0]["ip_cidr"] == ["127.0.0.0/8", *(f"::ffff:{one}" for one in ("127.0.0.0/104", "0.0.0.0/104"))]
    assert found[2] == {"ip_cidr": ["0.0.0.0/8"], "port_range": ["1:65535"], "action": "reject"}


def test_bound() -> None:
    tree: dict[str, Any] = {
        "outbounds": [dict(DIRECT), {**DIRECT, "tag": "b", "bind_interface": "wg0"}, {**DIRECT, "detour": "warp"}]
    }
    close(tree, CLOSED)
    assert [outbound.get("bind_interface") for outbound in tree["outbounds"]] == ["eth0", "wg0", None]


def test_an_interface_that_the_core_chooses() -> None:
    """The core refuses an outbound with both, so the node warns instead."""
    tree: dict[str, Any] = {"outbounds": [{**DIRECT, "network_strategy": "default"}]}
    assert close(tree, CLOSED).warnings
    assert "bind_interface" not in tree["outbounds"][0]


def test_no_outbounds() -> None:
    """The core has a direct outbound of its own then, and the node warns that it is bound to no interface."""
    tree: dict[str, Any] = {}
    assert close(tree, CLOSED).warnings
    assert {"action": "resolve"} in tree["route"]["rules"]


def test_open() -> None:
    """Without the setting a configuration stays as it is."""
    tree: dict[str, Any] = {"outbounds": [dict(DIRECT)]}
    assert close(tree, Closed()).notes == ()
    assert tree == {"outbounds": [DIRECT]}
