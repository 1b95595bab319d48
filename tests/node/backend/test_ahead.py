"""A roster that is built ahead is the one of the users who are saved in the end, whatever changed meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from node.backend.roster import Ahead, Roster
from node.contract.accounts import Account
from protos.service_pb2 import User
from tests.node.backend.test_roster import TAGS, account_of, person, roster_of, users

PLAN = cast(Any, SimpleNamespace(tags=TAGS, account=account_of))


def saved(*users: User) -> list[bytes]:
    """These users as a node saves them."""
    return [*roster_of(*users)[0].users.values()]


def state(roster: Roster) -> object:
    return roster.users, roster.limits, roster.target, roster.off, {key: roster.tags_of(key) for key in roster.users}


@settings(deadline=None)
@given(st.lists(users, max_size=6), st.lists(users, max_size=6))
def test_it_is_the_roster_of_the_last_users(before: list[User], after: list[User]) -> None:
    """With the same refusals; if users contest a credential, the caller builds it again."""
    ahead = Ahead(PLAN)
    ahead.catch_up(saved(*before))
    last = saved(*after)
    ahead.catch_up(last)
    roster, refused = roster_of(*map(User.FromString, last))
    if not ahead.roster.contested:
        assert state(ahead.roster) == state(roster)
        assert sorted(ahead.refused) == sorted(refused)
    assert ahead.roster.contested == roster.contested and ahead.users == last


def test_only_changes_are_built() -> None:
    """Of users who were added, changed or removed; not of others."""
    built: list[str] = []

    def account(tag: str, user: User) -> Account | None:
        built.append(user.email)
        return account_of(tag, user)

    ahead = Ahead(cast(Any, SimpleNamespace(tags=TAGS, account=account)))
    names = ["ann", "bob", "cy", "bad"]
    before = saved(*(person(name, name, "a") for name in names))
    ahead.catch_up(before)
    assert built == [*names, "bad"]
    built.clear()
    ahead.catch_up([*before])
    assert not built
    last = saved(
        person("ann", "ann", "a"), person("bad", "bad", "a"), person("bob", "other", "a"), person("di", "di", "a")
    )
    ahead.catch_up(last)
    # A refused user is looked at again: the reason may have gone.
    assert built == ["bad", "bob", "di", "bad"]
    assert ahead.roster.target["a"] == {"ann": b"a/ann/ann", "bob": b"a/bob/other", "di": b"a/di/di"}
    assert [refusal.email for refusal in ahead.refused] == ["bad"]


def test_a_credential_that_became_free() -> None:
    """A user whom it kept out comes in."""
    ahead = Ahead(PLAN)
    ahead.catch_up(saved(person("ann", "one", "a"), person("bob", "one", "a")))
    assert ahead.roster.contested and [refusal.email for refusal in ahead.refused] == ["bob"]
    ahead.catch_up(saved(person("bob", "one", "a")))
    assert not ahead.roster.contested and not ahead.refused
    assert ahead.roster.target["a"] == {"bob": b"a/bob/one"}
