"""The core's names for users: what the node sends has them, and nothing that it reads still has them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.process.aliases import PATTERN, PLAIN, Aliases, unaliased
from node.contract.counters import SEPARATOR

TAGS = ("in", "other >>> one", "in\n3")
ALIASES = Aliases(TAGS)
names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).filter(lambda name: ">>>" not in name)
# Patterns that Python and the cores' engine read in the same way.
PATTERNS = (
    *("ann", "^ann", "ann$", "^ann@x$", r"\d", r"\d$", ".*", "^.{3}$", ".....", "0", "^[^0]+$", "[^-a]", r"[^\]a]"),
    *(
        "[^]a]$",
        r"\W",
        r"\D$",
        r"\S{6}",
        r"[\W_]",
        r"^[\D]+$",
        "(?i:^ANN)",
        r"(?is:^(?:a.*|[^a].*)$)",
        r"\$",
        "[$.]",
        "a|b$",
    ),
    *("(ann|bob)@", r"^\w+$", r"\b1\b", "", "x*"),
)


def fits(users: list[str], name: str) -> bool:
    """Whether a rule for these users applies, as the core decides it."""
    patterns = [user.removeprefix(PATTERN) for user in users if user.startswith(PATTERN) and user != PATTERN]
    return name in users or any(re.search(pattern, name, re.ASCII) for pattern in patterns)


def test_without_tags_names_are_plain() -> None:
    """So it is with the setting off, and in a core that an earlier node started so."""
    assert not PLAIN and PLAIN.end("in") == "" and PLAIN.all("ann") == ["ann"]
    assert PLAIN.fitting(["ann", "regexp:.*"]) == ["ann", "regexp:.*"]
    counters = {"user>>>ann>>>traffic>>>uplink": 1}
    assert PLAIN.read(counters) is counters


@given(names)
def test_names(name: str) -> None:
    """Each inbound has another name for a user, and each is the user's own in a text that the core wrote."""
    found = ALIASES.all(name)
    assert found == [name, *(name + ALIASES.end(tag) for tag in TAGS)] and len({*found}) == 1 + len(TAGS)
    assert {unaliased(f"from 127.0.0.2:1 accepted email: {each}") for each in found} == {
        f"from 127.0.0.2:1 accepted email: {name}"
    }
    assert ALIASES.end("unknown") == ""


def test_counters() -> None:
    """Those of users by inbound get the inbound's tag; others stay, also those of numbers that no inbound has."""
    ends = ("0", "1", "3", "x", "")
    counters = {f"user>>>a@x{SEPARATOR}{end}>>>traffic>>>uplink": number for number, end in enumerate(ends)}
    plain = {"user>>>ann>>>traffic>>>downlink": 8, "inbound>>>in>>>traffic>>>uplink": 9}
    found = dict(ALIASES.read(counters | plain))
    assert found.pop(f"user_inbound>>>a@x{SEPARATOR}in>>>traffic>>>uplink") == 0
    assert found.pop(f"user_inbound>>>a@x{SEPARATOR}other >>> one>>>traffic>>>uplink") == 1
    assert found == dict([*counters.items()][2:]) | plain


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["ann", "ann@x", "bob", "bob1", "0", "a.b$", "-", "]", "_", "Ann Ba"])
def test_a_pattern_fits_as_before(pattern: str, name: str) -> None:
    """A controller's rule for users by a regular expression fits the core's names as it fitted the users' own."""
    users = [PATTERN + pattern]
    found = ALIASES.fitting(users)
    assert {fits(found, alias) for alias in ALIASES.all(name)} == {fits(users, name)}


@given(names, st.lists(names))
def test_users_fit_as_before(name: str, users: list[str]) -> None:
    """A rule for users by name fits all names of these and no others."""
    users = [user for user in users if not user.startswith(PATTERN)]
    found = ALIASES.fitting(users)
    assert {fits(found, alias) for alias in ALIASES.all(name)} == {name in users}


@pytest.mark.parametrize("pattern", ["a)(b", "(a", "a)", "[a"])
def test_an_invalid_pattern(pattern: str) -> None:
    """The core ignores it, and the node does not make it valid."""
    (found,) = ALIASES.fitting([PATTERN + pattern])
    with pytest.raises(re.error):
        re.compile(found.removeprefix(PATTERN))
