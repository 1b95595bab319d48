"""ABUSE and ABUSE_INBOUNDS: what they mean, and what is refused with which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.abuse.options import AbuseOptions
from node.abuse.parsing import by_inbound, by_kind
from node.contract.abuse import OFF, AbuseRules, Action, Kind, Rule

CUT = Rule(Action.CUT, 600)
SLOW = Rule(Action.SLOW, 600, 1_000_000)


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", {}),
        (
            "torrent: cut 10m; scan: tell; mail: block",
            {Kind.TORRENT: CUT, Kind.SCAN: Rule(Action.TELL), Kind.MAIL: Rule(Action.BLOCK)},
        ),
        ("Torrent CUT 2h;", {Kind.TORRENT: Rule(Action.CUT, 7200)}),
        ("torrent:cut", {Kind.TORRENT: CUT}),
        ("scan: slow", {Kind.SCAN: SLOW}),
        ("scan: slow 512K 30s", {Kind.SCAN: Rule(Action.SLOW, 30, 512_000)}),
        ("scan: slow 2M", {Kind.SCAN: Rule(Action.SLOW, 600, 2_000_000)}),
        ("mail: off", {Kind.MAIL: OFF}),
    ],
)
def test_rules(text: str, rules: dict[Kind, Rule]) -> None:
    """Each form of a rule."""
    assert by_kind(text) == rules


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("torrents: tell", "not a kind"),
        ("torrent", "not a kind"),
        ("torrent: ban", "not a kind"),
        ("scan: block", "no core"),
        ("torrent: tell 10m", "10m"),
        ("torrent: cut 10", "not a time"),
        ("torrent: cut 1s", "not a time"),
        ("torrent: cut 31d", "not a time"),
        ("torrent: slow fast", "not a speed"),
        ("torrent: slow 1K", "no speed"),
        ("torrent: cut 10m 10m", "10m"),
        ("torrent: tell; torrent: cut", "two actions"),
    ],
)
def test_faults(text: str, fault: str) -> None:
    """A text that cannot be meant is refused, and the error says what is wrong."""
    with pytest.raises(ValueError, match=fault):
        by_kind(text)


def test_by_inbound() -> None:
    """Tags may have colons; `off` stands for all kinds."""
    found = by_inbound("free: torrent block, scan cut 1h; VLESS: TCP: mail: tell;staff: off; a:torrent:cut")
    assert found == {
        "free": {Kind.TORRENT: Rule(Action.BLOCK), Kind.SCAN: Rule(Action.CUT, 3600)},
        "VLESS: TCP": {Kind.MAIL: Rule(Action.TELL)},
        "staff": dict.fromkeys(Kind, OFF),
        "a": {Kind.TORRENT: CUT},
    }
    with pytest.raises(ValueError, match="no tag"):
        by_inbound("torrent block")


def test_which_rule_holds() -> None:
    """A rule of the inbound, else that of all; without any the kind is off."""
    rules = AbuseRules(by_kind("torrent: cut; mail: block"), by_inbound("free: torrent block; staff: off"))
    assert rules
    assert rules.of("free", Kind.TORRENT).action is Action.BLOCK
    assert rules.of("free", Kind.MAIL).action is Action.BLOCK
    assert rules.of("other", Kind.TORRENT) == CUT
    assert rules.of("staff", Kind.TORRENT) == rules.of("other", Kind.SCAN) == OFF
    tags = ["free", "staff", "other"]
    assert rules.blocked(Kind.TORRENT, tags) == ["free"] and rules.reported(Kind.TORRENT, tags) == ["other"]
    assert rules.blocked(Kind.MAIL, tags) == ["free", "other"]


def test_without_rules_it_is_off() -> None:
    """Unset, or off everywhere."""
    assert not AbuseOptions().rules
    assert not AbuseRules(by_kind("torrent: off"), by_inbound("free: off"))


@given(st.text())
def test_any_text(text: str) -> None:
    """Any text gives rules or one error."""
    for parse in (by_kind, by_inbound):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)


def test_the_number_of_rules() -> None:
    """Another one if a configuration would get something else; what only the node does changes nothing."""
    tell = AbuseRules(by_kind("torrent: tell"))
    same = [AbuseRules(by_kind("torrent: cut 5m; scan: slow 1M")), AbuseRules(by_kind("torrent: slow 1M; mail: off"))]
    other = [
        AbuseRules(),
        AbuseRules(by_kind("torrent: block")),
        AbuseRules(by_kind("torrent: tell; mail: block")),
        AbuseRules(by_kind("torrent: tell"), by_inbound("free: off")),
        AbuseRules(by_kind("torrent: tell"), by_inbound("free: torrent block")),
        AbuseRules(by_kind("torrent: tell"), exempt=frozenset({"anna"})),
        AbuseRules(by_kind("torrent: tell"), sniffs=True),
    ]
    assert {rules.number for rules in same} == {tell.number}
    assert len({rules.number for rules in (*other, tell)}) == len(other) + 1
    assert AbuseRules(by_kind("torrent: off")).number == 0
