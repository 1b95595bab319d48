"""The guard for a core that a request of a user could crash: on messages of the real core, which accepts them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.xray import messages, overrides
from drivers.xray.config import ApiAddress, Plan, plan, render
from drivers.xray.generation import own_counters
from protos.xray_pb2 import Config, RouterConfig
from scripts.staging.core import Json, xray_number
from tests.harness.convert import accepts, convert

OLD = (26, 3, 27)
API = ApiAddress("/nowhere/api.sock", "0123", direct=False)
PARTS: Json = {
    "outbounds": [{"protocol": "freedom", "tag": "direct"}],
    "dns": {"servers": ["127.0.0.1"], "hosts": {"a.test": "127.0.0.1"}},
    "routing": {"balancers": [{"tag": "b", "selector": [""]}], "rules": [{"network": "tcp", "balancerTag": "b"}]},
}


def guarded(version: tuple[int, ...] = OLD, **parts: Any) -> Plan:
    text = json.dumps(parts)
    return plan(convert(text), text, frozenset(), version)


def router(made: Plan) -> RouterConfig:
    message = Config.FromString(render(made, API, {}))
    return RouterConfig.FromString(next(app for app in message.app if app.type == messages.ROUTER).value)


@pytest.mark.core
@pytest.mark.parametrize("parts", [PARTS, {"outbounds": PARTS["outbounds"]}], ids=["whole", "no routing, no DNS"])
def test_the_first_rule(parts: Json) -> None:
    """It precedes all others and leads to an outbound that is neither the default nor counted."""
    made = guarded(**parts)
    first, *others = router(made).rule
    assert (first.tag, first.rule_tag) == ("~txnode-guard", "~txnode-rule-guard")
    assert overrides._GUARDED in first.SerializeToString()
    assert all("guard" not in rule.tag for rule in others)
    assert [outbound.tag for outbound in made.base.outbound] == ["direct", "~txnode-guard"]
    assert "outbound>>>~txnode-guard>>>traffic>>>uplink" in own_counters(API, made.base.outbound)
    assert "safer core" in made.warnings[-1]
    assert all(list(some.outbound_selector) == ["direct"] for some in router(made).balancing_rule)


@pytest.mark.core
@pytest.mark.parametrize("version", [OLD, overrides.GEODATA])
def test_answers_of_the_dns(version: tuple[int, ...]) -> None:
    """The DNS has the guard's answer beside those of the configuration."""
    dns = next(app for app in guarded(version, **PARTS).base.app if app.type == messages.DNS).value
    for part in (b"a.test", overrides._GUARDED, b"#3"):
        assert part in dns


@pytest.mark.core
def test_the_core_takes_it() -> None:
    """The core accepts its version's form; both forms around the change are valid."""
    version = OLD if xray_number() <= OLD else (26, 4, 13)
    assert accepts(render(guarded(version, **PARTS), API, {})) == ""


@pytest.mark.core
def test_a_core_that_needs_none() -> None:
    made = guarded(overrides.SAFE_SINCE, **PARTS)
    assert (len(made.base.outbound), made.first) == (1, b"")
    assert "safer core" not in str(made.warnings)
    assert b"#3" not in made.base.SerializeToString()


def caught(name: str) -> bool:
    return bool(re.search(overrides._GUARDED.decode(), name))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a" * 253, False),
        ("a" * 254, True),
        ("a" * 253 + "\n", True),
        ("\u044f" * 20 + ".test", False),
        ("\u044f" + "a" * 31, True),
        ("a" * 31 + "\U0001f600", True),
    ],
)
def test_what_it_catches(name: str, expected: bool) -> None:
    assert caught(name) is expected


@given(st.lists(st.tuples(st.sampled_from("a.\n\u044f\U0001f600"), st.integers(1, 130)), max_size=5))
def test_what_passes(parts: list[tuple[str, int]]) -> None:
    """It lets no name pass that is longer than the DNS allows, whatever its characters."""
    name = "".join(character * times for character, times in parts)
    assert caught(name) or len(name.encode()) <= 253
