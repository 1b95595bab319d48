"""Rosters: what a change is, who holds a credential, and that the same rule holds live, at a Start and at a resume."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node.backend.roster import Roster
from node.backend.supplied import one_spelling
from node.contract.accounts import Account, Accounts, Change, Refusal, Unusable, apply, diff, key_of
from protos.service_pb2 import Proxy, Trojan, User, Vless, Wireguard

TAGS = ("a", "b", "c")


def account_of(tag: str, user: User) -> Account | None:
    """A driver's rule in small: the password is the credential; none if empty, one is unusable; with addresses."""
    password = user.proxies.trojan.password
    if not password:
        return None
    if password == "bad":
        raise Unusable("the password is bad")
    return Account(f"{tag}/{user.email}/{password}".encode(), password.encode(), addresses(user))


def addresses(user: User) -> tuple[bytes, ...]:
    return tuple(ip_address(text).packed for text in user.proxies.wireguard.peer_ips)


def person(email: str, password: str = "", *inbounds: str, ips: Iterable[str] = ()) -> User:
    proxies = Proxy(trojan=Trojan(password=password), wireguard=Wireguard(peer_ips=ips))
    return User(email=email, proxies=proxies, inbounds=inbounds)


def roster_of(*users: User) -> tuple[Roster, list[Refusal]]:
    return Roster.of(users, TAGS, account_of)


emails = st.sampled_from(["ann", "ANN", "bob", "cy", "İ", "i", "ΑΣ", "ας", ""])
passwords = st.sampled_from(["", "one", "two", "bad"])
inbounds = st.lists(st.sampled_from([*TAGS, "unknown"]), max_size=4)
ips = st.sets(st.sampled_from(["10.0.0.1", "10.0.0.2", "fd00::1"]), max_size=2)
users = st.builds(
    lambda email, password, tags, some: person(email, password, *tags, ips=sorted(some)),
    *(emails, passwords, inbounds, ips),
)
account_sets = st.dictionaries(st.sampled_from("vwxyz"), st.binary(max_size=2))
targets = st.fixed_dictionaries(dict.fromkeys(TAGS, account_sets))


@settings(deadline=None)
@given(targets, targets)
def test_a_diff_leads_to_its_target(before: dict[str, Accounts], after: dict[str, Accounts]) -> None:
    """A diff turns the old accounts into the target, and the old accounts are not modified."""
    kept = {tag: dict(accounts) for tag, accounts in before.items()}
    assert apply(diff(before, after), before) == after
    assert before == kept


@settings(deadline=None)
@given(targets, targets)
def test_a_diff_touches_no_other_user(before: dict[str, Accounts], after: dict[str, Accounts]) -> None:
    """A diff has exactly the users whose account differs, each once."""
    touched = [(tag, key) for tag, key, _ in diff(before, after)]
    assert sorted(touched) == sorted(
        (tag, key)
        for tag in TAGS
        for key in before[tag].keys() | after[tag].keys()
        if before[tag].get(key) != after[tag].get(key)
    )


def test_a_diff_from_nothing_adds_everybody() -> None:
    """A core that has confirmed nothing for an inbound yet gets all its users."""
    assert diff({}, {"a": {"ann": b"1"}}) == [Change("a", "ann", b"1")]


def stored(roster: Roster) -> list[User]:
    return [User.FromString(packed) for packed in roster.users.values()]


def play(roster: Roster, steps: Iterable[User | str]) -> None:
    """Put users and remove keys, checking that `touched` names every change of the target."""
    for step in steps:
        before = {tag: dict(accounts) for tag, accounts in roster.target.items()}
        touched = roster.remove(key_of(step)) if isinstance(step, str) else roster.put(step)[0]
        assert {(tag, key) for tag, key, _ in diff(before, roster.target)} <= touched


@settings(deadline=None)
@given(st.lists(users, max_size=12), st.lists(st.one_of(users, emails), max_size=12))
def test_live_and_resumed_rosters_agree(first: list[User], steps: list[User | str]) -> None:
    """After any changes the accounts are those that the stored users, in stored order, would give at a start."""
    roster, _ = roster_of(*first)
    play(roster, steps)
    resumed, _ = Roster.of(stored(roster), TAGS, account_of)
    assert resumed.target == roster.target
    assert list(resumed.users.items()) == list(roster.users.items())


@settings(deadline=None)
@given(st.lists(users, max_size=12), st.lists(st.one_of(users, emails), max_size=12))
def test_the_first_in_stored_order_has_it(first: list[User], steps: list[User | str]) -> None:
    """Per inbound, each credential and address is held by one user: the first in stored order of those who claim it.

    A user who does not hold all of their claims is not in; the claims that they hold stay theirs.
    """
    roster, _ = roster_of(*first)
    play(roster, steps)
    for tag in TAGS:
        expected: dict[str, bytes] = {}
        claimed: set[str] = set()
        for user in stored(roster):
            password = user.proxies.trojan.password
            if tag not in user.inbounds or password in ("", "bad"):
                continue
            claims = {password, *user.proxies.wireguard.peer_ips}
            if claims.isdisjoint(claimed):
                expected[key_of(user.email)] = f"{tag}/{user.email}/{password}".encode()
            claimed |= claims
        assert roster.target[tag] == expected


@settings(deadline=None)
@given(st.lists(users, max_size=12), st.lists(users, max_size=12))
def test_users_not_in_force_were_refused(first: list[User], then: list[User]) -> None:
    """A user with a credential for a known inbound is in force there, or refused by name whenever they are supplied."""
    roster, _ = roster_of(*first)
    for user in then:
        _, refused = roster.put(user)
        waits = {tag for tag in TAGS if tag in user.inbounds and user.proxies.trojan.password}
        waits -= {tag for tag in TAGS if key_of(user.email) in roster.target[tag]}
        assert len(refused) == (1 if not user.email else len(waits))
        assert {refusal.email for refusal in refused} <= {user.email}


@settings(deadline=None)
@given(st.lists(users, max_size=12), st.lists(users, max_size=12))
def test_a_set_built_on_another_equals_one_built_from_nothing(before: list[User], everybody: list[User]) -> None:
    """A set built with the help of the previous one equals the set built from nothing."""
    helped, refused = Roster.of(everybody, TAGS, account_of, roster_of(*before)[0])
    alone, refused_alone = roster_of(*everybody)
    assert (helped.users, helped.target, refused) == (alone.users, alone.target, refused_alone)
    for user in before:
        assert helped.put(user) == alone.put(user)
    assert (helped.users, helped.target) == (alone.users, alone.target)


@settings(deadline=None)
@given(st.lists(users, max_size=12))
def test_the_same_user_again_changes_nothing(everybody: list[User]) -> None:
    """Users who are supplied again as they are stored touch nothing and keep their order."""
    roster, _ = roster_of(*everybody)
    before = list(roster.users.items())
    for user in stored(roster):
        assert roster.put(user)[0] == set()
    assert list(roster.users.items()) == before


def test_inbounds_in_another_order_change_nothing() -> None:
    """The random order in which a controller lists a user's inbounds means nothing: the user keeps their place."""
    roster, _ = roster_of(person("ann", "one", "a", "b"), person("bob", "one", "a", "b"))
    touched, refused = roster.put(person("ann", "one", "b", "a"))
    assert (touched, refused) == (set(), [])
    assert [*roster.target["a"], *roster.target["b"]] == ["ann", "ann"]


def test_a_released_credential_goes_to_the_next_user() -> None:
    """A released credential goes to the user who has waited longest for it."""
    roster, refused = roster_of(*(person(name, "one", "a") for name in ("ann", "bob", "cy")))
    assert [refusal.email for refusal in refused] == ["bob", "cy"]
    assert roster.remove("ann") == {("a", "ann"), ("a", "bob")}
    assert roster.put(person("bob", "two", "a"))[0] == {("a", "bob"), ("a", "cy")}
    assert roster.target["a"] == {"cy": b"a/cy/one", "bob": b"a/bob/two"}


def test_swapped_credentials() -> None:
    """Two users who trade credentials, one message each, both end with what they asked for."""
    roster, _ = roster_of(person("ann", "one", "a"), person("bob", "two", "a"))
    roster.put(person("ann", "two", "a"))
    assert "ann" not in roster.target["a"]
    roster.put(person("bob", "one", "a"))
    assert roster.target["a"] == {"ann": b"a/ann/two", "bob": b"a/bob/one"}


def test_swapped_addresses() -> None:
    """Two users who trade addresses in one sync both end with what they asked for, and neither is refused."""
    one, two = ["10.0.0.1", "fd00::1"], ["10.0.0.2", "fd00::2"]
    roster, _ = roster_of(person("ann", "a", "a", ips=one), person("bob", "b", "a", ips=two))
    touched, refused = roster.put_all([person("ann", "a", "a", ips=two), person("bob", "b", "a", ips=one)])
    assert roster.target["a"].keys() == {"ann", "bob"}
    assert refused == []
    assert touched == {("a", "ann"), ("a", "bob")}


def test_an_address_of_another_user() -> None:
    """A user who claims a held address is refused and gets in when it is free; their other claims stay theirs."""
    roster, refused = roster_of(
        person("ann", "a", "a", ips=["10.0.0.1"]), person("bob", "b", "a", ips=["10.0.0.2", "10.0.0.1"])
    )
    assert refused == [Refusal("bob", "a: 'ann' has the same address 10.0.0.1")]
    assert roster.put(person("cy", "c", "a", ips=["10.0.0.2"]))[1] == [
        Refusal("cy", "a: 'bob' has the same address 10.0.0.2")
    ]
    assert roster.remove("ann") == {("a", "ann"), ("a", "bob")}
    assert roster.remove("bob") == {("a", "bob"), ("a", "cy")}


def test_no_credential_is_none() -> None:
    """A user with an empty password is not let in, and not refused."""
    roster, refused = roster_of(person("ann", "", "a"), person("bob", "", "a"))
    assert (roster.target["a"], refused) == ({}, [])


@pytest.mark.parametrize("tags", [(), ("unknown",), ("", "unknown")])
def test_no_known_inbound_removes(tags: tuple[str, ...]) -> None:
    """A user with none of the known inbounds is removed, in whatever case their e-mail is written."""
    roster, _ = roster_of(person("Ann", "one", "a"))
    assert roster.put(person("aNN", "one", *tags)) == ({("a", "ann")}, [])
    assert roster.users == {}
    assert roster.target == {tag: {} for tag in TAGS}


def test_unknown_inbounds_are_ignored() -> None:
    """Tags of other cores beside a known one, or a known one twice, do not matter and are no errors."""
    roster, refused = roster_of(person("ann", "one", "elsewhere", "a", "a"))
    assert refused == []
    assert roster.target == {"a": {"ann": b"a/ann/one"}, "b": {}, "c": {}}


def test_one_bad_inbound_spares_the_others() -> None:
    """A user who cannot have an account in one inbound still gets the others."""

    def picky(tag: str, user: User) -> Account | None:
        if tag == "a":
            raise Unusable("not here")
        return account_of(tag, user)

    roster, refused = Roster.of([person("ann", "one", "a", "b")], TAGS, picky)
    assert refused == [Refusal("ann", "a: not here")]
    assert roster.target["b"] == {"ann": b"b/ann/one"}


@pytest.mark.parametrize("email", ["", "a>>>b", "a\nb", "a\x00b", "a\u2028b"])
def test_names_that_counters_and_logs_cannot_hold(email: str) -> None:
    """An e-mail that would break counters or logs is refused and changes nothing."""
    roster, refused = roster_of(person(email, "one", "a"))
    assert [refusal.email for refusal in refused] == [email]
    assert roster.users == {}


def test_the_last_entry_of_a_name_wins() -> None:
    """Of two entries in one set with the same e-mail the last one counts, even a removal."""
    roster, refused = roster_of(person("ann", "one", "a"), person("bob", "two", "a"), person("ann", "one", "b"))
    assert refused == []
    assert roster.target == {"a": {"bob": b"a/bob/two"}, "b": {"ann": b"b/ann/one"}, "c": {}}
    gone, _ = roster_of(person("ann", "one", "a"), person("ann"))
    assert gone.users == {}


def test_a_second_spelling_is_refused_by_name() -> None:
    """Two spellings of one e-mail in a set are two users by mistake: the first stays, the other is refused."""
    refused: list[Refusal] = []
    kept = one_spelling([person("Ann", "one"), person("ann", "two"), person("Ann", "three")], refused)
    assert {key: (user.email, user.proxies.trojan.password) for key, user in kept.items()} == {"ann": ("Ann", "three")}
    assert [refusal.email for refusal in refused] == ["ann"]
    assert "'Ann'" in refused[0].reason


def test_a_new_spelling_alone_renames() -> None:
    """A user who comes in another spelling later is the same user with a new name."""
    roster, _ = roster_of(person("Ann", "one", "a"))
    assert roster.put(person("ann", "one", "a")) == ({("a", "ann")}, [])
    assert roster.target["a"] == {"ann": b"a/ann/one"}
    assert list(roster.users) == ["ann"]


@pytest.mark.parametrize(
    ("email", "key"),
    [("Ann@X.org", "ann@x.org"), ("İ", "i"), ("ΑΣ", "ας"[:1] + "σ"), ("ẞ", "ß"), ("K", "k"), ("42", "42"), ("", "")],
)
def test_keys_as_go_lowers_them(email: str, key: str) -> None:
    """One simple lower-case letter for each letter, no final sigma, no dot that is left over (strings.ToLower)."""
    assert key_of(email) == key


@settings(deadline=None)
@given(st.text())
@example("İ")
def test_keys_are_stable(email: str) -> None:
    """A key has as many characters as the name, and is its own key."""
    key = key_of(email)
    assert len(key) == len(email)
    assert key_of(key) == key


def test_users_are_kept_as_they_came() -> None:
    """The whole message is stored for a resume, with credentials of inbounds that are unknown today."""
    user = person("ann", "one", "a", "elsewhere")
    user.proxies.vless.CopyFrom(Vless(id="b831381d-6324-4d53-ad4f-8cda48b30811"))
    roster, _ = roster_of(user)
    kept = stored(roster)[0]
    assert (kept.proxies, set(kept.inbounds)) == (user.proxies, set(user.inbounds))


def test_nothing_is_left_of_a_conflict() -> None:
    """Once no user waits for a credential or an address any more, the roster keeps no trace of that."""
    roster, _ = roster_of(person("ann", "a", "a", ips=["10.0.0.1"]))
    for number in range(2, 10):
        ips = ["10.0.0.1", f"10.0.0.{number}"]
        roster.put(person("bob", "a", "a", ips=ips))
        roster.put(person("cy", "c", "a", ips=ips))
        roster.put(person("ann", "a", "a", ips=ips[number % 2 :]))
    for name in ("ann", "bob", "cy"):
        roster.remove(name)
    assert not any(map(any, (roster._waiting.values(), roster._holder.values(), roster._addresses.values())))


def test_the_same_set_again_keeps_the_same_objects() -> None:
    """A Start with the same set may still be refused: the roster's objects must stay the same."""
    users = person("ann", "one", "a"), person("bob", "one", "a")
    roster, refused = roster_of(*users)
    there, limits = roster.users, roster.limits
    assert Roster.of(users, TAGS, account_of, roster) == (roster, refused)
    assert roster.users is there and roster.limits is limits
