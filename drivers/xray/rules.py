"""The routing rules of a configuration, their changes while it runs, and the selectors of balancers. Pure.

The core appends rules and removes them by tag, so each gets one. Rules without a tag, and all added ones, get a tag of
the node's; the name that controllers use follows its colon. Selectors match outbounds by the beginnings of tags: the
core's Select does not tell the outbound of its API from others (`app/proxyman/outbound/outbound.go`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple

from drivers.process.json_text import parse
from drivers.xray.messages import OBSERVATORIES, OURS, REVERSE, ROUTER, VLESS, edited
from node.base.errors import InvalidConfig, InvalidRequest, UnknownName, shown
from node.contract.routing import Routing
from protos import xray_pb2
from protos.xray_pb2 import Config, RouterConfig, RoutingRule, TypedMessage

# Characters of one rule. The core takes requests of up to 4 MiB.
MOST = 1024**2
# The most tags that all selectors of a configuration together may expand to.
MOST_SELECTED = 1_000_000
_BEGINNINGS = frozenset(OURS[:length] for length in range(len(OURS) + 1))
_RULE = f"{OURS}rule-"
# The form of second tags of rules, and what follows it where the first one is not the node's.
_AGAIN, _PLAIN = f"{_RULE}again-", "=:"


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


def other_tag(tag: str) -> str:
    """Another tag for a rule, by which the core can have it a second time; and the first one for that."""
    if tag.startswith(_AGAIN):
        rest = tag.removeprefix(_AGAIN)
        return rest.removeprefix(_PLAIN) if rest.startswith(_PLAIN) else f"{_RULE}{rest}"
    return f"{_AGAIN}{tag.removeprefix(_RULE)}" if tag.startswith(_RULE) else f"{_AGAIN}{_PLAIN}{tag}"


def recalled(wanted: Iterable[str], listed: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """By tag of a wanted rule, the tag that the core has it under; and the tags of second copies, to remove.

    Rules are moved to the end by appending all of them under their other tags, and then removing the first ones, from
    the last to the first. If that was broken off while it appended, the first ones count.
    """
    places = {tag: number for number, tag in enumerate(listed)}
    found = {tag: sorted({tag, other_tag(tag)} & places.keys(), key=places.__getitem__) for tag in wanted}
    twice = [some for some in found.values() if len(some) > 1]
    once = next((some[0] for some in found.values() if len(some) == 1), None)
    all_appended = once is None or (bool(twice) and places[once] > places[twice[0][-1]])
    counts = -1 if all_appended else 0
    live = {tag: some[counts] for tag, some in found.items() if some}
    return live, [tag for some in twice for tag in some if tag != some[counts]]


def public(tag: str) -> str:
    """The name that controllers use for a rule; empty if it has none."""
    return tag.partition(":")[2] if tag.startswith(_RULE) else tag


def name_rules(base: Config) -> None:
    """Give each rule a tag. Raises `InvalidConfig` for a tag with the node's prefix."""
    with edited(router_app(base), RouterConfig) as router:
        for number, rule in enumerate(router.rule):
            _refuse_ours(rule)
            rule.rule_tag = rule.rule_tag or f"{_RULE}{number}:"


def router_app(base: Config) -> TypedMessage:
    return next(app for app in base.app if app.type == ROUTER)


def rules_of(base: Config) -> list[RoutingRule]:
    return list(router_of(base).rule)


def router_of(base: Config) -> RouterConfig:
    return RouterConfig.FromString(next((app.value for app in base.app if app.type == ROUTER), b""))


def outbounds_of(base: Config) -> list[str]:
    """The outbound tags that rules and balancers may use."""
    tags = (*(outbound.tag for outbound in base.outbound), *bridged(base))
    return [tag for tag in dict.fromkeys(tags) if tag and not tag.startswith(OURS)]


def bridged(base: Config) -> Iterator[str]:
    """The tags of reverse proxies, which act as outbounds but are not listed as such."""
    yield from _portals(base)
    for inbound in base.inbound:
        if inbound.proxy_settings.type == VLESS:
            for user in xray_pb2.UsersConfig.FromString(inbound.proxy_settings.value).users:
                account = xray_pb2.VlessAccount.FromString(user.account.value)
                if account.HasField("reverse"):
                    yield account.reverse.tag


def bind_selectors(base: Config) -> None:
    """Expand each selector that could match the node's tags to the outbounds of the configuration that it matches.

    Raises `InvalidConfig` for tags that a selector could not tell from the node's.
    """
    tags = (*(outbound.tag for outbound in base.outbound), *_portals(base))
    outbounds = [tag for tag in dict.fromkeys(tags) if tag]
    for tag in (*outbounds, *(inbound.tag for inbound in base.inbound if inbound.tag)):
        if _could_be_ours(tag):
            raise InvalidConfig(f"the tag {tag!r} is too similar to the node's own, which begin with {OURS!r}")
    reached = {beginning: [tag for tag in outbounds if tag.startswith(beginning)] for beginning in _BEGINNINGS}
    room = MOST_SELECTED
    for app in base.app:
        if app.type == ROUTER:
            with edited(app, RouterConfig) as router:
                for balancer in router.balancing_rule:
                    room = _write_out(balancer.outbound_selector, reached, room)
        elif app.type in OBSERVATORIES:
            with edited(app, xray_pb2.ObservatoryConfig) as observatory:
                room = _write_out(observatory.subject_selector, reached, room)


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
    config = Config()
    config.CopyFrom(base)
    with edited(router_app(config), RouterConfig) as router:
        kept = [rule for rule in router.rule if is_own(rule.rule_tag) or _is_kept(rule, routing)]
        _require_named(base, routing, rules)
        _require_distinct(kept, rules)
        del router.rule[:]
        router.rule.extend([*kept, *rules])
    return config


def _is_kept(rule: RoutingRule, routing: Routing) -> bool:
    return not routing.cleared and public(rule.rule_tag) not in routing.removed


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


def _portals(base: Config) -> Iterator[str]:
    for app in base.app:
        if app.type == REVERSE:
            for portal in xray_pb2.ReverseConfig.FromString(app.value).portal_config:
                yield portal.tag


def _write_out(selectors: MutableSequence[str], reached: Mapping[str, list[str]], room: int) -> int:
    """Expand the selectors in place. Returns how many more tags are allowed."""
    wide = [reached[beginning] for beginning in _BEGINNINGS.intersection(selectors)]
    room -= sum(map(len, wide))
    if room < 0:
        most = f"{MOST_SELECTED:,} outbounds in all"
        raise InvalidConfig(f"the selectors of balancers and observatories match more than {most}")
    narrow = (selector for selector in selectors if not _could_be_ours(selector))
    selectors[:] = dict.fromkeys((*narrow, *(tag for tags in wide for tag in tags)))
    return room


def _could_be_ours(beginning: str) -> bool:
    """Whether it is a prefix of the node's tags, or begins with theirs."""
    return beginning in _BEGINNINGS or beginning.startswith(OURS)
