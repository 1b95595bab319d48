"""The core's names for users: what the node sends has them, and nothing that it reads still has them."""

from __future__ import annotations

import re
import time

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
    *(r"ann[\x00-\x7f]", r"[\W-]$", r"[a-c\D][^a]", r"b[\t-~]", r"[\x01-\x03.-]$", r"[^\x00-\x1f]$"),
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
    # A controller may name inbounds, and users of inbounds that are not managed, so.
    plain |= {f"{begin}{SEPARATOR}0{'0' * 5000}>>>traffic>>>uplink": 1 for begin in ("user>>>ann", "inbound>>>in")}
    plain[f"inbound>>>in{SEPARATOR}0>>>traffic>>>uplink"] = 1
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


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"\Qa.b$", r"\Qa.b$\E"),
        (r"a\P{Lu}", r"a[^\x1f\p{Lu}]"),
        (r"\pC", r"[^\x1f\PC]"),
        # Under (?i) a class of Go's, written as ranges, would have other letters.
        (r"(?i)\W", r"(?i)[^\x1f\w]"),
        (r"[[:^alpha:]_]", r"(?:[_]|[^\x1f[:alpha:]])"),
        (r"[[:ascii:]-\pL]", r"(?:[\-]|[^\x1f[:^ascii:]]|[^\x1f\PL])"),
        (r"[\W^\x{0}-\177]", r"(?:[\^\x{0}-\x1e\x20-\177]|[^\x1f\w])"),
        (r"[\x1f-a\0-\x1f]", r"[\x20-a\0-\x1f]"),
    ],
)
def test_what_only_the_core_reads(pattern: str, found: str) -> None:
    """Classes that hold all but some characters must not hold what separates a name from its end."""
    (widened,) = ALIASES.fitting([PATTERN + pattern])
    assert f"(?:{found})[" in widened


def test_a_name_like_the_beginning_of_a_pattern() -> None:
    """It is a name to the core, but with an end it would be a pattern, for all users of an inbound."""
    (found,) = ALIASES.fitting([PATTERN])
    assert all(fits([found], alias) for alias in ALIASES.all(PATTERN))
    assert not any(fits([found], alias) for alias in ALIASES.all("ann"))


@pytest.mark.parametrize("begin", ["[", "[a", r"\x{", r"\p{", "[:", "[[:a", r"\Q", "[a-", "("])
def test_a_long_pattern_takes_no_time(begin: str) -> None:
    """A controller may send one of megabytes that no engine accepts."""
    start = time.process_time()
    ALIASES.fitting([PATTERN + begin * 100_000 + "\\"])
    assert time.process_time() - start < 2


@given(names, st.lists(names))
def test_users_fit_as_before(name: str, users: list[str]) -> None:
    """A rule for users by name fits all names of these and no others."""
    users = [user for user in users if not user.startswith(PATTERN)]
    found = ALIASES.fitting(users)
    assert {fits(found, alias) for alias in ALIASES.all(name)} == {name in users}


@pytest.mark.parametrize("pattern", ["a)(b", "(a", "a)", "[a", "[]a", "[^]a(b)", "(a)[b"])
def test_an_invalid_pattern(pattern: str) -> None:
    """The core ignores it, and the node does not make it valid."""
    (found,) = ALIASES.fitting([PATTERN + pattern])
    with pytest.raises(re.error):
        re.compile(found.removeprefix(PATTERN))
