"""Routing and outbounds: what the node adds, and what stays unchanged."""

from __future__ import annotations

import json
import time

import pytest

from drivers.xray import messages
from drivers.xray.generation import own_counters
from drivers.xray.messages import OURS
from node.base.errors import InvalidConfig
from protos import xray_pb2
from protos.xray_pb2 import Config
from scripts.staging.core import Json
from tests.harness.convert import convert
from tests.harness.rendering import (
    DIRECT,
    THROUGH_INBOUND,
    apps,
    of,
    rendered,
    router,
    taken_over,
    vless,
)

pytestmark = pytest.mark.core


def test_our_rule_is_first() -> None:
    """The rule for the API precedes the controller's rules, which stay unchanged with their strategy."""
    rules = [{"outboundTag": "out", "network": "tcp"}, {"outboundTag": "out", "inboundTag": ["in"]}]
    made = of(
        outbounds=[{"protocol": "freedom", "tag": "out"}],
        routing={"domainStrategy": "IPIfNonMatch", "rules": rules},
    )
    found = router(rendered(made))
    assert [rule.tag for rule in found.rule] == [THROUGH_INBOUND.outbound, "out", "out"]
    assert list(found.rule[0].inbound_tag) == [THROUGH_INBOUND.inbound]
    (app,) = apps(made.base, messages.ROUTER)
    (in_force,) = apps(rendered(made), messages.ROUTER)
    assert in_force.value.endswith(app.value)


def test_a_core_that_listens_itself() -> None:
    """A core that can serve its API on a unix socket needs neither an inbound nor a rule for it."""
    made = of(outbounds=[{"protocol": "freedom"}])
    message = rendered(made, DIRECT)
    (app,) = apps(message, messages.COMMANDER)
    assert xray_pb2.CommanderConfig.FromString(app.value).listen == "/nowhere/api.sock,0600"
    assert (len(message.inbound), list(router(message).rule)) == (0, [])


def test_the_api_has_its_own_inbound() -> None:
    """Older cores get an inbound on a private unix socket, with the port that such an inbound needs."""
    (handler,) = rendered(of(outbounds=[{"protocol": "freedom"}])).inbound
    settings = xray_pb2.DokodemoConfig.FromString(handler.proxy_settings.value)
    receiver = xray_pb2.ReceiverConfig.FromString(handler.receiver_settings.value)
    assert (handler.tag, settings.port > 0, list(settings.networks)) == (THROUGH_INBOUND.inbound, True, [4])
    assert receiver.listen.domain == "/nowhere/api.sock,0600"


@pytest.mark.parametrize("parts", [{}, {"outbounds": []}, {"OUTBOUNDS": []}])
def test_without_outbounds_nothing_goes_out(parts: Json) -> None:
    """A configuration without outbounds gets a blackhole: neither the API nor the node forwards traffic."""
    (outbound,) = rendered(of(**parts)).outbound
    assert outbound.proxy_settings.type == messages.BLACKHOLE
    assert outbound.tag != THROUGH_INBOUND.outbound


def test_the_first_outbound_stays_the_first() -> None:
    """Outbounds stay unchanged; one without a tag gets one that is not counted."""
    out = [{"protocol": "freedom", "tag": "one"}, {"protocol": "blackhole"}, {"protocol": "freedom"}]
    text = json.dumps({"outbounds": out})
    made = rendered(taken_over(text)).outbound
    own = [outbound.tag for outbound in made[1:]]
    assert len(set(own)) == 2
    for tag in own:
        assert tag.startswith(OURS)
        assert f"outbound>>>{tag}>>>traffic>>>uplink" in own_counters(THROUGH_INBOUND, made)
    assert not any(name.startswith("outbound>>>one") for name in own_counters(THROUGH_INBOUND, made))
    # Those that a node with other settings has added to a core that runs on.
    for tag in ("guard", "bare", "mail", "torrent", "torrent-0", "torrent-3"):
        assert f"outbound>>>{OURS}{tag}>>>traffic>>>downlink" in own_counters(THROUGH_INBOUND, made)
    for outbound in made[1:]:
        outbound.tag = ""
    assert list(made) == list(Config.FromString(convert(text)).outbound)


SELECTORS = (
    [""],
    ["~"],
    ["~t"],
    ["~txnode"],
    ["~txnode-api-"],
    [f"~txnode-api-{first}" for first in "0123456789abcdef"],
    ["one", ""],
    ["", "zzz"],
    ["tw", "~"],
    ["", "", "~", "txnode-"],
)


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_no_selector_reaches_the_api(selector: list[str]) -> None:
    """Selectors match by prefix: none matches the API's outbound, and all others still match."""
    tags = ["one", "two", "three", "txnode-api-7", "~ two", "portal"]
    made = of(
        outbounds=[{"protocol": "freedom", "tag": tag} for tag in tags[:-1]] + [{"protocol": "freedom"}],
        reverse={"portals": [{"tag": tags[-1], "domain": "portal.test"}]},
        observatory={"subjectSelector": selector},
        burstObservatory={"subjectSelector": selector, "pingConfig": {}},
        routing={
            "balancers": [{"tag": "b", "selector": selector}],
            "rules": [{"balancerTag": "b", "network": "tcp"}],
        },
    )
    message = rendered(made)
    (balancer,) = router(message).balancing_rule
    observatories = [
        xray_pb2.ObservatoryConfig.FromString(app.value).subject_selector
        for app in message.app
        if ".observatory." in app.type
    ]
    assert len(observatories) == 2
    for bound in map(list, (balancer.outbound_selector, *observatories)):
        assert _matched(bound, [THROUGH_INBOUND.outbound]) == []
        assert _matched(bound, tags) == _matched(selector, tags)


@pytest.mark.parametrize("tag", ["~", "~tx", "~txnode-", "~txnode-api-7"])
def test_tags_like_the_nodes(tag: str) -> None:
    """A tag with the node's prefix, or a part of it, is refused: a selector could mean either."""
    portal = {"reverse": {"portals": [{"tag": tag, "domain": "portal.test"}]}}
    for parts in (
        {"outbounds": [{"protocol": "freedom", "tag": tag}]},
        {"inbounds": [{**vless(), "tag": tag}]},
        portal,
    ):
        with pytest.raises(InvalidConfig, match=tag):
            of(**parts)


def test_selectors_without_measure() -> None:
    """Thousands of balancers that select thousands of outbounds take little time; too many are refused."""
    outbounds = [{"protocol": "blackhole", "tag": str(number)} for number in range(2000)]

    def balanced(balancers: int) -> list[int]:
        routing = {"balancers": [{"tag": str(number), "selector": [""] * 500} for number in range(balancers)]}
        made = of(outbounds=outbounds, routing=routing)
        return [len(found.outbound_selector) for found in router(made.base).balancing_rule]

    began = time.process_time()
    assert balanced(20) == [2000] * 20
    assert time.process_time() - began < 2
    with pytest.raises(InvalidConfig, match="outbounds"):
        balanced(501)


def _matched(selector: list[str], tags: list[str]) -> list[str]:
    return [tag for tag in tags if any(tag.startswith(prefix) for prefix in selector)]


def test_other_selectors_stay() -> None:
    """A selector that cannot match the API's outbound stays unchanged."""
    made = of(
        outbounds=[{"protocol": "freedom", "tag": "one-1"}],
        routing={"balancers": [{"tag": "b", "selector": ["one-", "gone"]}], "rules": []},
    )
    (found,) = router(made.base).balancing_rule
    assert list(found.outbound_selector) == ["one-", "gone"]
