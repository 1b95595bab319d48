"""The routing rules of a configuration, and their changes while it runs. Pure.

The core appends rules and removes them by tag, so each gets one. Rules without a tag, and all added ones, get a tag of
the node's; the name that controllers use follows its colon.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from drivers.json_text import parse
from drivers.xray.exclusive import bridged
from drivers.xray.overrides import ROUTER
from drivers.xray.selectors import OURS
from node.base.errors import InvalidConfig, InvalidRequest, UnknownName, shown
from node.contract.routing import Routing
from protos.xray_pb2 import Config, RouterConfig, RoutingRule

# Characters of one rule. The core takes requests of up to 4 MiB.
MOST = 1024**2
_RULE = f"{OURS}rule-"


class Steps(NamedTuple):
    """Rules to append, in order, and then tags to remove, in order."""

    appended: list[RoutingRule]
    removed: list[str]


def steps(have: Sequence[str], wanted: Sequence[RoutingRule]) -> Steps:
    """The steps from the rules with the tags `have` to those `wanted`.

    Appends come first, then removals from the last to the first: at any moment a connection is routed by the old rules
    or the new ones.
    """
    there, staying = set(have), {rule.rule_tag for rule in wanted}
    appended = [rule for rule in wanted if rule.rule_tag not in there]
    return Steps(appended, [tag for tag in reversed(have) if tag not in staying])


def text_of(routing: Routing) -> str:
    """A configuration with only the added rules. Raises `InvalidRequest` for a rule that is not a JSON object."""
    return json.dumps({"routing": {"rules": [_read(rule.text) for rule in routing.added]}})


def own_tag(token: str) -> str:
    """The tag of the rule for the core's API, which controllers never see."""
    return f"{_RULE}{token}"


def is_own(tag: str) -> bool:
    return tag.startswith(_RULE) and ":" not in tag


def public(tag: str) -> str:
    """The name that controllers use for a rule; empty if it has none."""
    return tag.partition(":")[2] if tag.startswith(_RULE) else tag


def name_rules(base: Config) -> None:
    """Give each rule a tag. Raises `InvalidConfig` for a tag with the node's prefix."""
    router = router_of(base)
    for number, rule in enumerate(router.rule):
        _refuse_ours(rule)
        rule.rule_tag = rule.rule_tag or f"{_RULE}{number}:"
    _put(base, router)


def rules_of(base: Config) -> list[RoutingRule]:
    return list(router_of(base).rule)


def router_of(base: Config) -> RouterConfig:
    return RouterConfig.FromString(next((app.value for app in base.app if app.type == ROUTER), b""))


def outbounds_of(base: Config) -> list[str]:
    """The outbound tags that rules and balancers may use."""
    tags = (*(outbound.tag for outbound in base.outbound), *bridged(base))
    return [tag for tag in dict.fromkeys(tags) if tag and not tag.startswith(OURS)]


def balancers_of(base: Config) -> list[str]:
    return [balancer.tag for balancer in router_of(base).balancing_rule]


def added(converted: Config, routing: Routing) -> list[RoutingRule]:
    """The added rules as the core converted them, each with its final tag.

    Raises `InvalidRequest` if the conversion has anything else than one rule for each.
    """
    router = router_of(converted)
    beside = converted.inbound or converted.outbound or router.balancing_rule
    if beside or len(router.rule) != len(routing.added):
        raise InvalidRequest("the rule must be one routing rule and nothing else")
    for rule, known in zip(router.rule, routing.added, strict=True):
        _refuse_ours(rule)
        rule.rule_tag = f"{_RULE}{known.token}:{rule.rule_tag}"
    return list(router.rule)


def changed(base: Config, routing: Routing, rules: Sequence[RoutingRule]) -> Config:
    """The configuration with these changes; `rules` are the added ones.

    Raises `UnknownName` for an unknown balancer or outbound, `InvalidRequest` for a tag that is in use.
    """
    config, router = Config(), router_of(base)
    config.CopyFrom(base)
    kept = [] if routing.cleared else [rule for rule in router.rule if public(rule.rule_tag) not in routing.removed]
    _require_named(base, routing, rules)
    _require_distinct(kept, rules)
    del router.rule[:]
    router.rule.extend([*kept, *rules])
    _put(config, router)
    return config


def tags_of(base: Config) -> frozenset[str]:
    """The names that controllers use for rules."""
    return frozenset(filter(None, (public(rule.rule_tag) for rule in router_of(base).rule)))


def _read(text: str) -> Any:
    """Parse a rule here, so that its text cannot close the rule and add other settings."""
    if len(text) > MOST:
        raise InvalidRequest(f"the rule is longer than {MOST:,} characters")
    try:
        rule = parse(text)
    except ValueError as error:
        raise InvalidRequest(f"the rule is not JSON: {error}") from error
    if not isinstance(rule, dict):
        raise InvalidRequest("the rule is not a JSON object")
    return rule


def _require_named(base: Config, routing: Routing, rules: Sequence[RoutingRule]) -> None:
    outbounds, balancers = set(outbounds_of(base)), set(balancers_of(base))
    # The core accepts unknown tags silently, and connections to them get no answer.
    for tag in (*(rule.tag for rule in rules if not rule.balancing_tag), *routing.targets.values()):
        if tag not in outbounds:
            raise UnknownName(f"there is no outbound {shown(tag)}")
    for tag in (*(rule.balancing_tag for rule in rules if rule.balancing_tag), *routing.targets):
        if tag not in balancers:
            raise UnknownName(f"there is no balancer {shown(tag)}")


def _require_distinct(kept: Sequence[RoutingRule], rules: Sequence[RoutingRule]) -> None:
    taken = {public(rule.rule_tag) for rule in kept}
    for rule in rules:
        tag = public(rule.rule_tag)
        if tag and tag in taken:
            raise InvalidRequest(f"there is already a rule with the tag {shown(tag)}")
        taken.add(tag)


def _refuse_ours(rule: RoutingRule) -> None:
    if rule.rule_tag.startswith(OURS):
        what = f"the rule's tag {shown(rule.rule_tag)} is reserved"
        raise InvalidConfig(f"{what}: tags that begin with {OURS!r} are the node's own")


def _put(base: Config, router: RouterConfig) -> None:
    next(app for app in base.app if app.type == ROUTER).value = router.SerializeToString()
