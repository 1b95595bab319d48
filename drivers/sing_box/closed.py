"""Keep users from the server itself: the rules that the node adds to a configuration. Pure.

Closed addresses are rejected as targets by a first rule. Names are resolved only where they leave by a direct outbound,
since a name that another proxy resolves must not become known here: before each rule that leads there, and at the end
if the default outbound is one, the core resolves the name and rejects what is closed. It then dials the addresses that
it has checked. Rules see the first packet of a UDP session only, so direct outbounds are bound to an interface.

Keys of rules and actions: `option/rule.go`, `option/rule_action.go` of sing-box 1.14.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drivers.process.closed import Closed, Effect
from drivers.process.json_text import Json

# The keys of a rule that are conditions; all others belong to its action.
_CONDITIONS = frozenset(
    (
        *("type", "mode", "rules", "invert", "inbound", "ip_version", "network", "auth_user", "protocol", "client"),
        *("domain", "domain_suffix", "domain_keyword", "domain_regex", "geosite", "geoip", "ip_cidr", "ip_is_private"),
        *("source_geoip", "source_ip_cidr", "source_ip_is_private", "source_port", "source_port_range", "port"),
        *("port_range", "process_name", "process_path", "process_path_regex", "user", "user_id", "clash_mode"),
        *("rule_set", "rule_set_ip_cidr_match_source", "interface_address", "network_interface_address"),
        *("default_interface_address", "source_mac_address", "source_hostname", "preferred_by", "wifi_ssid"),
        *("wifi_bssid", "network_type", "network_is_expensive", "network_is_constrained", "package_name"),
        *("package_name_regex", "rule_set_ipcidr_match_source"),
    )
)
# With these the core chooses the interface of an outbound itself, and accepts no other one.
_CHOOSING = ("network_strategy", "network_type", "fallback_network_type", "fallback_delay")
# "This host". The core gives its port 0 to a session of UDP over TCP, version 1, whose packets have the targets.
_ZERO, _ANY_PORT = "0.0.0.0/8", "1:65535"
_ZONED: Json = {
    "type": "logical",
    "mode": "and",
    "rules": [
        {"type": "logical", "mode": "or", "rules": [{"ip_version": 4}, {"ip_version": 6}]},
        {"ip_cidr": ["0.0.0.0/0", "::/0"], "invert": True},
    ],
}
_RESOLVER = ("server", "strategy", "disable_cache", "rewrite_ttl", "client_subnet")


def close(tree: Json, closed: Closed) -> Effect:
    """Close a configuration whose outbounds have tags."""
    if not closed:
        return Effect()
    route = tree.setdefault("route", {})
    own = route.get("rules", [])
    ways = _direct(tree)
    rejects = [{**each, "action": "reject"} for each in _closing(closed)]
    fixed = [inbound["tag"] for inbound in tree.get("inbounds", []) if inbound.get("type") == "direct"]
    named = [closed.yields and _names(rule, closed) for rule in own]
    first = max((number + 1 for number, is_named in enumerate(named) if is_named), default=0)
    rules: list[Json] = []
    for number, rule in enumerate([*own, None]):
        if number == first:
            rules += (_but(reject, fixed) for reject in rejects)
        if rule is None:
            break
        if not named[number] and _leads(rule) in ways:
            rules += _resolved(_condition(rule), ways[rule["outbound"]], closed, fixed)
        rules.append(rule)
    if (default := _default(tree)) in ways:
        rules += _resolved({}, ways[default], closed, fixed)
    route["rules"] = rules
    # Without any outbound the core uses one of its own, which cannot be bound.
    return Effect.of(closed, first_only=True, all_bound=_bind(tree, closed.interface) and bool(tree.get("outbounds")))


def _bind(tree: Json, interface: str) -> bool:
    """Bind direct outbounds to the interface, if there is one. Returns whether all could be bound."""
    leaving = [each for each in tree.get("outbounds", []) if each.get("type") == "direct" and not each.get("detour")]
    for outbound in leaving:
        if interface and not any(key in outbound for key in _CHOOSING):
            outbound.setdefault("bind_interface", interface)
    return all("bind_interface" in outbound for outbound in leaving)


def _closing(closed: Closed) -> list[Json]:
    """The conditions of closed targets, and of all with a zone, as ::1%lo: no network contains these."""
    networks, own = closed.with_mapped
    at_ports: list[Json] = [{"ip_cidr": [_ZERO], "port_range": [_ANY_PORT]}] if _ZERO in networks else []
    at_ports += [{"ip_cidr": [*own], "port": [*closed.ports]}] if own else []
    return [{"ip_cidr": [one for one in networks if one != _ZERO]}, _ZONED, *at_ports]


def _resolved(condition: Json, resolver: Json, closed: Closed, fixed: list[str]) -> Iterator[Json]:
    yield _but({**condition, "action": "resolve", **resolver}, fixed)
    for each in _closing(closed):
        both = {"type": "logical", "mode": "and", "rules": [condition, each]} if condition else each
        yield _but({**both, "action": "reject"}, fixed)


def _but(rule: Json, fixed: list[str]) -> Json:
    """The rule, but not for inbounds whose clients do not choose the target."""
    if not fixed:
        return rule
    others = {"inbound": fixed, "invert": True}
    condition = _condition(rule)
    action = {key: value for key, value in rule.items() if key not in condition}
    both = {"type": "logical", "mode": "and", "rules": [condition, others]} if condition else others
    return {**both, **action}


def _leads(rule: Mapping[str, Any]) -> str | None:
    """The outbound of a rule; None if it leads to none, or to a target of its own."""
    # Without a transparent proxy `bypass` acts as `route`.
    is_route = rule.get("action", "route") in ("route", "bypass") and "override_address" not in rule
    return rule.get("outbound") if is_route else None


def _condition(rule: Mapping[str, Any]) -> Json:
    return {key: value for key, value in rule.items() if key in _CONDITIONS}


def _names(rule: Mapping[str, Any], closed: Closed) -> bool:
    """Whether a rule, or one within it, names closed targets on purpose."""
    texts = rule.get("ip_cidr", [])
    listed = any(map(closed.covers, [texts] if isinstance(texts, str) else texts))
    within = any(_names(each, closed) for each in rule.get("rules", []))
    return listed or within or bool(rule.get("ip_is_private"))


def _default(tree: Mapping[str, Any]) -> str:
    """The tag of the default outbound; "" for the core's own one."""
    outbounds = tree.get("outbounds", [])
    return str(tree.get("route", {}).get("final") or (outbounds[0]["tag"] if outbounds else ""))


def _direct(tree: Mapping[str, Any]) -> dict[str, Json]:
    """How to resolve names, by the tags of outbounds that are direct, or lead to one: as a group, or by `detour`."""
    common = tree.get("route", {}).get("default_domain_resolver")
    found = {"": _resolver(common)} if not tree.get("outbounds") else {}
    leading: dict[str, list[str]] = {}
    for outbound in tree.get("outbounds", []):
        is_direct, detour = outbound.get("type") == "direct", outbound.get("detour")
        if is_direct and not detour:
            found[outbound["tag"]] = _resolver(outbound.get("domain_resolver") or common)
        elif is_direct or "outbounds" in outbound:
            leading[outbound["tag"]] = [detour] if is_direct else outbound["outbounds"]
    for _ in leading:  # one may lead to another
        for tag, others in leading.items():
            inner = next((other for other in others if other in found), None)
            if inner is not None:
                found.setdefault(tag, found[inner])
    return found


def _resolver(chosen: Any) -> Json:
    if isinstance(chosen, str):
        return {"server": chosen} if chosen else {}
    return {key: chosen[key] for key in _RESOLVER if key in chosen} if chosen else {}
