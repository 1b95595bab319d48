"""Rules that keep users out: encoded as the core's version does, and read again from their tags."""

from __future__ import annotations

import pytest

from drivers.xray.bars import Bars, nesting
from drivers.xray.messages import ROUTER
from drivers.xray.rules import is_own
from protos.xray_pb2 import Config, RouterConfig, RoutingRule, TypedMessage

ADDRESS = bytes.fromhex("0a04cb0071071020")
# What Xray 26.3.27 and 26.7.28 make of a source.
OLD, NEW = bytes.fromhex("5a0a1208") + ADDRESS, bytes.fromhex("5a0c0a0a0a08") + ADDRESS


def converted(source: bytes) -> bytes:
    rule = RoutingRule.FromString(source)
    rule.tag, rule.rule_tag = "out", "named"
    value = RouterConfig(rule=[rule]).SerializeToString()
    return Config(app=[TypedMessage(type=ROUTER, value=value)]).SerializeToString()


@pytest.mark.parametrize("source", [OLD, NEW])
def test_sources_are_encoded_as_the_core_does(source: bytes) -> None:
    bars = Bars("token", nesting(converted(source)), {"anna": ["203.0.113.7", "2001:db8::/64"], "gone": ["10.0.0.1"]})
    [rule] = bars.rules({"anna": ["Anna", "anna"]})
    packed = rule.SerializeToString()
    assert source in packed
    assert bytes.fromhex("0a1020010db8") + bytes(12) + b"\x10\x40" in packed
    assert b"\x3a\x04Anna\x3a\x04anna" in packed
    assert RouterConfig.FromString(bars.settings({"anna": ["Anna", "anna"]})).rule == [rule]
    assert bars.read(["direct", rule.rule_tag]) == {"anna": ["203.0.113.7", "2001:db8::/64"]}
    assert is_own(rule.rule_tag)
    assert bars.is_bar(rule.rule_tag)
    assert not Bars("other").is_bar(rule.rule_tag)


def test_an_unknown_encoding() -> None:
    """Then no user is kept out in that way, and a note says so."""
    assert nesting(converted(b"")) == ()
    assert Bars("token", (), {"anna": ["10.0.0.1"]}).rules({"anna": ["anna"]}) == []
    assert "refuses none" in Bars("token").note and "refuses new connections" in Bars("token", (b"\x5a",)).note


def test_a_name_that_the_core_would_take_for_a_pattern() -> None:
    [rule] = Bars("token", (b"\x5a", b"\x12"), {"x": ["10.0.0.1"]}).rules({"x": ["regexp:.*"]})
    assert rb"regexp:^regexp:\.\*$" in rule.SerializeToString()
