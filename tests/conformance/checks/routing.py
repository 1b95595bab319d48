"""Checks of what current panels use in addition: outbounds' latency, and routing while the core runs."""

from __future__ import annotations

import json
from functools import partial

from protos.service_pb2 import (
    AddRoutingRuleRequest,
    BalancerInfoRequest,
    Empty,
    LatencyRequest,
    OverrideBalancerTargetRequest,
    RemoveRoutingRuleRequest,
    TestRouteRequest,
)
from scripts.staging.page import page
from tests.conformance import registry
from tests.conformance.context import Context
from tests.conformance.registry import Level, State
from tests.conformance.stage import BALANCER, BLOCKED, VLESS

check = partial(registry.check, "operations")

XRAY = ["xray"]


@check("latency", Level.CONTROLLERS, state=State.STOPPED, optional=True, cores=XRAY)
def latency(context: Context) -> None:
    """GetOutboundsLatency returns state and delay of an outbound that an observatory tests."""
    with page(context.stage.options.echo) as url:
        probes = {"subjectSelector": ["direct"], "probeUrl": url, "probeInterval": "1s"}
        context.start(observatory=probes)
        context.node.call("GetOutboundsLatency", LatencyRequest())
        context.soon(lambda: _latencies(context)["direct"][0], "the outbound is alive")
        _, delay = _latencies(context)["direct"]
        assert 0 <= delay < 10_000, f"a delay of {delay} ms"


def _latencies(context: Context) -> dict[str, tuple[bool, int]]:
    reply = context.node.call("GetOutboundsLatency", LatencyRequest())
    return {latency.name: (latency.alive, latency.delay) for latency in reply.latencies}


@check("routing.rules", Level.CONTROLLERS, optional=True, cores=XRAY)
def rules(context: Context) -> None:
    """An added rule is listed and routes traffic; removed, routing is as before."""
    tags = listed(context)
    context.comes_in(context.anna)
    rule = {"type": "field", "port": context.stage.echo.port, "outboundTag": "block", "ruleTag": "added"}
    context.node.call("AddRoutingRule", AddRoutingRuleRequest(rule=json.dumps(rule)))
    assert listed(context) == [*tags, ("block", "added")], f"listed are {listed(context)}"
    context.stays_out(context.anna)
    context.node.call("RemoveRoutingRule", RemoveRoutingRuleRequest(rule_tag="added"))
    assert listed(context) == tags, f"listed are {listed(context)}"
    context.comes_in(context.anna)


def listed(context: Context) -> list[tuple[str, str]]:
    return [(rule.outbound_tag, rule.rule_tag) for rule in context.node.call("ListRoutingRules", Empty()).rules]


@check("routing.test", Level.CONTROLLERS, optional=True, cores=XRAY)
def route(context: Context) -> None:
    """TestRoute returns the outbound of a connection."""
    request = TestRouteRequest(inbound_tag=VLESS, network="tcp", target_domain=BLOCKED, target_port=80)
    assert context.node.call("TestRoute", request).outbound_tag == "block"


@check("routing.balancer", Level.CONTROLLERS, optional=True, cores=XRAY)
def balancer(context: Context) -> None:
    """An overridden balancer uses the given outbound, which GetBalancerInfo returns, until the override is removed."""
    to = context.stage.balanced
    assert context.node.call("GetBalancerInfo", BalancerInfoRequest(tag=BALANCER)).override_target == ""
    context.comes_in(context.anna, to=to)
    override(context, "block")
    context.stays_out(context.anna, to=to)
    override(context, "")
    context.comes_in(context.anna, to=to)


def override(context: Context, target: str) -> None:
    context.node.call("OverrideBalancerTarget", OverrideBalancerTargetRequest(balancer_tag=BALANCER, target=target))
    reply = context.node.call("GetBalancerInfo", BalancerInfoRequest(tag=BALANCER))
    assert reply.override_target == target, f"the override is {reply.override_target!r}"
