"""Steps from one set of rules to another: no connection is misrouted meanwhile, and the node's own rules stay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.process.allowlist import NOTHING_MORE
from drivers.xray import api, generation, rules
from drivers.xray.config import ApiAddress, plan, render, rerouted
from node.base.errors import InvalidConfig, InvalidRequest, NodeError, UnknownName
from node.contract.routing import Added, Routing
from protos import service_pb2 as pb
from protos.service_pb2 import Latency, RouteResult
from protos.xray_pb2 import Config, OutboundStatus, RouterConfig, RoutingContext, RoutingRule, TypedMessage

ROUTER = "xray.app.router.Config"
OUTBOUND = {"type": "xray.proxy.freedom.Config"}
TAGS = st.lists(st.sampled_from("abcdefgh"), unique=True)


def tagged(*tags: str) -> list[RoutingRule]:
    return [RoutingRule(tag="direct", rule_tag=tag) for tag in tags]


@given(TAGS, TAGS, st.dictionaries(st.sampled_from("abcdefgh"), st.sets(st.integers(0, 4))))
def test_every_moment(have: list[str], wanted: list[str], fits: dict[str, set[int]]) -> None:
    """Whatever rules match a connection, at each step it is routed by the old set or the new one."""
    staying = [tag for tag in have if tag in wanted]
    # Rules that stay keep their order and precede new ones: the core only appends.
    wanted = [*staying, *(tag for tag in wanted if tag not in have)]

    def led(tags: Sequence[str], connection: int) -> str:
        return next((tag for tag in tags if connection in fits.get(tag, ())), "by default")

    todo, now = rules.steps(have, tagged(*wanted)), list(have)
    for appended, removed in [*((rule.rule_tag, "") for rule in todo.appended), *(("", tag) for tag in todo.removed)]:
        now = [tag for tag in [*now, appended] if tag and tag != removed]
        for connection in range(5):
            assert led(now, connection) in (led(have, connection), led(wanted, connection))
    assert now == wanted


def configuration(*some: RoutingRule, balancers: Sequence[str] = ()) -> bytes:
    router = RouterConfig(rule=some)
    for tag in balancers:
        router.balancing_rule.add(tag=tag)
    config = Config(app=[TypedMessage(type=ROUTER, value=router.SerializeToString())])
    for tag in ("direct", "block", ""):
        config.outbound.add(tag=tag).proxy_settings.type = OUTBOUND["type"]
    return config.SerializeToString()


def converted(*some: RoutingRule) -> bytes:
    router = RouterConfig(rule=some)
    return Config(app=[TypedMessage(type=ROUTER, value=router.SerializeToString())]).SerializeToString()


BASE = plan(
    configuration(*tagged("", "named", "", "last"), balancers=["both"]), '{"routing": {"rules": []}}', frozenset()
)


def tags(base: Config) -> list[str]:
    return [rules.public(rule.rule_tag) for rule in rules.rules_of(base)]


def change(routing: Routing, *some: RoutingRule) -> Any:
    return rerouted(BASE, routing, converted(*some), "{}", (26, 3, 27), NOTHING_MORE)


def test_each_rule_has_a_name_of_its_own() -> None:
    """A rule can be removed by its tag; controllers see the tags that they gave."""
    names = [rule.rule_tag for rule in rules.rules_of(BASE.base)]
    assert len(set(names)) == 4
    assert tags(BASE.base) == ["", "named", "", "last"]
    with pytest.raises(InvalidConfig, match="own"):
        plan(configuration(*tagged("~txnode-x")), "{}", frozenset())


def test_changes() -> None:
    """Removed rules are gone, added ones come last with their tag, and the plan itself is unchanged."""
    routing = Routing(removed=frozenset({"named"})).adding("{}", "t1").adding("{}", "t2").leading("both", "block")
    made = change(routing, *tagged("named", ""))
    assert tags(made.base) == ["", "", "last", "named", ""]
    assert [rule.tag for rule in made.routing.added] == ["named", ""]
    assert tags(BASE.base) == ["", "named", "", "last"]
    only = change(routing.adding("{}", "t3", reset=True), *tagged("last"))
    assert tags(only.base) == ["last"]


def test_the_node_s_own_rules_are_first() -> None:
    """The rule that protects an old core, and the one for the API of cores that need it."""
    made = change(Routing(cleared=True).adding("{}", "t"), *tagged("x"))
    api = ApiAddress("/run/x.sock", "token", direct=False)
    guard, first, *others = rules.rules_of(Config.FromString(render(made, api, {})))
    assert (guard.tag, first.tag) == ("~txnode-guard", api.outbound)
    assert all(rules.is_own(rule.rule_tag) for rule in (guard, first))
    assert not any(rules.is_own(rule.rule_tag) for rule in others)


@pytest.mark.parametrize(
    ("routing", "some", "kind"),
    [
        (Routing().adding("{}", "t"), tagged("named"), InvalidRequest),
        (Routing().adding("{}", "t"), tagged("~txnode-a"), InvalidConfig),
        (Routing().adding("{}", "t"), tagged("a", "b"), InvalidRequest),
        (Routing().adding("{}", "t"), [], InvalidRequest),
        (Routing().adding("{}", "t"), [RoutingRule(tag="gone")], UnknownName),
        (Routing().adding("{}", "t"), [RoutingRule(tag="")], UnknownName),
        (Routing().adding("{}", "t"), [RoutingRule(tag="~txnode-out-2")], UnknownName),
        (Routing().adding("{}", "t"), [RoutingRule(balancing_tag="gone")], UnknownName),
        (Routing().leading("gone", "direct"), [], UnknownName),
        (Routing().leading("both", "gone"), [], UnknownName),
    ],
)
def test_invalid_changes(routing: Routing, some: list[RoutingRule], kind: type[NodeError]) -> None:
    with pytest.raises(kind):
        change(routing, *some)


@pytest.mark.parametrize("text", ["", "{", "[]", "{},{}", "{}]}, {", '"x"', "[" * 100_000, " " * (rules.MOST + 1)])
def test_texts_that_are_no_rule(text: str) -> None:
    with pytest.raises(InvalidRequest):
        rules.text_of(Routing().adding(text, "t"))


def test_a_text_is_one_value_in_the_configuration() -> None:
    """Comments are removed, and text after the value cannot end it."""
    text = rules.text_of(Routing().adding('{"domain": ["]}}"] /* }]} */}', "t"))
    assert json.loads(text) == {"routing": {"rules": [{"domain": ["]}}"]}]}}


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.text(), st.booleans()),
        st.tuples(st.just("remove"), st.sampled_from("abc"), st.just(False)),
        st.tuples(st.just("lead"), st.text(min_size=1), st.booleans()),
    )
)


@given(CHANGES)
def test_what_is_recorded(changes: list[tuple[str, str, bool]]) -> None:
    """Changes survive a round trip through the record, and an empty record has none."""
    routing = Routing()
    for number, (what, text, flag) in enumerate(changes):
        if what == "add":
            routing = routing.adding(text, str(number), flag)
        elif what == "remove":
            routing = routing.without(text)
        else:
            routing = routing.leading(text, "x" if flag else "")
    assert Routing.unpack(routing.pack()) == routing
    assert (routing.pack() == b"") == (routing == Routing())


def test_what_is_added_goes_before_what_was_there() -> None:
    """A tag means the added rule, if one has it."""
    routing = Routing(removed=frozenset({"a"}), added=(Added("{}", "1", "a"), Added("{}", "2", "b")))
    assert routing.without("a") == Routing(removed=frozenset({"a"}), added=(Added("{}", "2", "b"),))
    assert routing.without("c").removed == {"a", "c"}


# Routes and latency


@pytest.mark.parametrize("wrong", [{"network": "smoke"}, {"target_ip": "1.2.3"}, {"target_port": 65536}])
def test_invalid_requests(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        api.asked_route(pb.TestRouteRequest(**wrong))


def test_the_request_to_the_core() -> None:
    request = pb.TestRouteRequest(network="UDP", target_ip="::1", target_port=53, attributes={"a": "b"}, user="ann")
    context = api.asked_route(request).routing_context
    assert (context.network, list(context.target_ips), context.target_port) == (3, [bytes(15) + b"\1"], 53)
    assert (dict(context.attributes), context.user) == ({"a": "b"}, "ann")
    assert api.asked_route(pb.TestRouteRequest()).routing_context == RoutingContext()


def test_the_answer_of_the_core() -> None:
    """An outbound that the node named has an empty tag."""
    told = RoutingContext(outbound_tag="out", network=2, target_domain="a", outbound_group_tags=["g"])
    expected = RouteResult(outbound_tag="out", network="tcp", target_domain="a", outbound_group_tags=["g"])
    assert api.route_of(told, told.outbound_tag) == expected
    unmatched = RoutingContext(network=2, target_domain="a")
    assert api.route_of(unmatched, "~txnode-out-0") == RouteResult(network="tcp", target_domain="a")


def test_latencies() -> None:
    """Each measured outbound, except those that the node named."""
    statuses = [
        OutboundStatus(outbound_tag="a", alive=True, delay=5, last_try_time=7),
        OutboundStatus(outbound_tag="~txnode-out-1"),
    ]
    row = Latency(name="a", alive=True, delay=5, link="a", last_try_time=7, source="xray-observatory")
    assert generation.latencies(statuses) == [row]
