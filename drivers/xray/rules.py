"""The routing rules of a configuration, and what is changed of them while it runs. Pure.

The core appends rules and removes them by their tags, so each has one. Those that a configuration or a controller did
not name, and all that are added, have the node's own tags; what controllers call them stands behind the colon.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from drivers.json_text import parse
from drivers.xray.exclusive import bridged
from drivers.xray.selectors import OURS
from drivers.xray.taken import ROUTER
from node.contract.routing import Routing
from node.errors import InvalidConfig, InvalidRequest, UnknownName, shown
from protos.xray_pb2 import Config, RouterConfig, RoutingRule

# Characters of one rule. The core takes requests of up to 4 MiB.
MOST = 1024**2
_RULE = f"{OURS}rule-"


class Steps(NamedTuple):
    """What to append, in this order, and then what to remove, in this order."""

    appended: list[RoutingRule]
    removed: list[str]


def steps(have: Sequence[str], wanted: Sequence[RoutingRule]) -> Steps:
    """How the rules of these tags become those that are wanted.

    New ones come before old ones go, and these from the last to the first: at every moment a connection is led as it
    was before, or as it is to be.
    """
    there, staying = set(have), {rule.rule_tag for rule in wanted}
    appended = [rule for rule in wanted if rule.rule_tag not in there]
    return Steps(appended, [tag for tag in reversed(have) if tag not in staying])


def text_of(routing: Routing) -> str:
    """A configuration of the added rules alone. Raises `InvalidRequest` for what is no JSON of a rule."""
    return json.dumps({"routing": {"rules": [_read(rule.text) for rule in routing.added]}})


def own_tag(token: str) -> str:
    """The tag of the rule that leads to the core's API, which controllers never see."""
    return f"{_RULE}{token}"


def is_own(tag: str) -> bool:
    return tag.startswith(_RULE) and ":" not in tag


def public(tag: str) -> str:
    """What controllers call a rule; empty for one that has no name."""
    return tag.partition(":")[2] if tag.startswith(_RULE) else tag


def name_rules(base: Config) -> None:
    """Give each rule a tag. Raises `InvalidConfig` for one that begins as the node's own do."""
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
    """The tags that rules and balancers may lead to."""
    tags = (*(outbound.tag for outbound in base.outbound), *bridged(base))
    return [tag for tag in dict.fromkeys(tags) if tag and not tag.startswith(OURS)]


def balancers_of(base: Config) -> list[str]:
    return [balancer.tag for balancer in router_of(base).balancing_rule]


def added(converted: Config, routing: Routing) -> list[RoutingRule]:
    """The added rules, as the core read them, each with the tag that the core is to know it by.

    Raises `InvalidRequest` if it made anything else of them.
    """
    router = router_of(converted)
    beside = converted.inbound or converted.outbound or router.balancing_rule
    if beside or len(router.rule) != len(routing.added):
        raise InvalidRequest("it is not one rule")
    for rule, known in zip(router.rule, routing.added, strict=True):
        _refuse_ours(rule)
        rule.rule_tag = f"{_RULE}{known.token}:{rule.rule_tag}"
    return list(router.rule)


def changed(base: Config, routing: Routing, rules: Sequence[RoutingRule]) -> Config:
    """The configuration with these changes; `rules` are the added ones.

    Raises `UnknownName` for a balancer that it does not have, or an outbound, `InvalidRequest` for a tag that is taken.
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
    """What controllers call the rules that have a name."""
    return frozenset(filter(None, (public(rule.rule_tag) for rule in router_of(base).rule)))


def _read(text: str) -> Any:
    """Read here, so that a rule cannot go on as something else behind its end."""
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
    # Whoever is led to what is not there gets no answer, and nobody is told.
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
            raise InvalidRequest(f"there is a rule {shown(tag)} already")
        taken.add(tag)


def _refuse_ours(rule: RoutingRule) -> None:
    if rule.rule_tag.startswith(OURS):
        what = f"the rule's tag {shown(rule.rule_tag)} is too much like"
        raise InvalidConfig(f"{what} the node's own, which begin with {OURS!r}")


def _put(base: Config, router: RouterConfig) -> None:
    next(app for app in base.app if app.type == ROUTER).value = router.SerializeToString()
