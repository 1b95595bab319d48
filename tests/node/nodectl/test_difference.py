"""The difference between a file and a node; it is empty once it was applied."""

from __future__ import annotations

import base64
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from drivers.process.credentials import shadowsocks_2022_key
from node.backend.listing import _View
from node.backend.roster import Roster
from node.contract.accounts import Account, Unusable
from node.nodectl.commands.users import _LIMITS, KEY_BYTES, _limits_of, new_proxies, new_tunnel
from node.nodectl.members import cells, difference, missing, not_in, proxies_of, settled, state_of
from protos import service_pb2 as pb

TAGS = ("a", "b")


def account_of(tag: str, user: pb.User) -> Account | None:
    password = user.proxies.trojan.password
    if password == "bad":
        raise Unusable("the password is bad")
    return Account(password.encode(), password.encode()) if password else None


def rows(roster: Roster) -> list[pb.ListedUser]:
    """The rows in which a node lists these users, with credentials."""
    view = _View(roster, {tag: (want, want) for tag, want in roster.target.items()}, settled=True, coming=False)
    found = []
    for key, packed in roster.users.items():
        user = pb.User.FromString(packed)
        found.append(view.row(key, user))
        found[-1].proxies.CopyFrom(user.proxies)
    return found


def person(name: str, password: str = "p", *inbounds: str) -> pb.User:
    return pb.User(email=name, inbounds=inbounds or ("a",), proxies=pb.Proxy(trojan=pb.Trojan(password=password)))


def node_with(*users: pb.User) -> Roster:
    roster = Roster(TAGS, account_of)
    roster.put_all(users)
    return roster


def test_what_differs() -> None:
    """Users to add, remove and change, with the names of differing fields, never with secrets."""
    there = rows(node_with(person("ann"), person("bob", "q", "a", "b", "far"), person("cid", "r")))
    wanted = [person("Ann"), person("bob", "other", "far", "b"), person("dan", "s")]
    found = difference(wanted, there)
    assert found.document == {
        "added": ["dan"],
        "changed": [{"name": "Ann", "what": ["spelling"]}, {"name": "bob", "what": ["inbounds", "trojan"]}],
        "removed": ["cid"],
        "same": 0,
    }
    assert [user.email for user in found.updates] == ["cid", "Ann", "bob", "dan"]
    assert not found.updates[0].inbounds and found.there == 3 and found.updates


def test_empty_proxies_and_order_are_no_difference() -> None:
    """Deployed controllers send every proxy, most of them empty, and inbounds in any order."""
    full = person("ann", "p", "a", "b")
    full.proxies.vless.SetInParent()
    found = difference([person("ann", "p", "b", "a", "a")], rows(node_with(full)))
    assert not found.updates and found.same == 1
    assert proxies_of(full.proxies).keys() == {"trojan"}


def test_removed_users_who_are_still_leaving_do_not_count() -> None:
    """They are not removed again; if the file has them, they are added."""
    leaving = pb.ListedUser(name="ann", leaving=["a"], pending=True)
    assert not difference([], [leaving]).updates
    assert [user.email for user in difference([person("ann")], [leaving]).added] == ["ann"]


def test_a_shortened_row() -> None:
    """It cannot be compared, so the user is sent again."""
    found = difference([person("ann")], [pb.ListedUser(name="ann", shortened=True)])
    assert [user.email for user, _ in found.changed] == ["ann"]


NAMES = st.sampled_from(["ann", "Ann", "bob", "CID", "dan", "eve"])
USERS = st.lists(
    st.builds(
        person,
        NAMES,
        st.sampled_from(["p", "q", "r", "", "bad"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["a", "b", "far"]),
    ),
    unique_by=lambda user: user.email.lower(),
)


@given(USERS, USERS, st.integers(1, 3))
def test_an_applied_difference_leaves_none(before: list[pb.User], wanted: list[pb.User], size: int) -> None:
    """For any earlier users, refusals and batch sizes."""
    roster = node_with(*before)
    found = difference(wanted, rows(roster))
    updates = found.updates
    for begin in range(0, len(updates), size):
        roster.put_all(updates[begin : begin + size])
    after = difference(wanted, rows(roster))
    assert (after.updates, after.same) == ([], len(wanted))
    assert {row.name for row in rows(roster)} == {user.email for user in wanted}
    assert found.same + len(found.changed) + len(found.added) == len(wanted)


# Rows


ROW = pb.ListedUser(name="ann", inbounds=["a", "b"], confirmed=["a", "b"])


def row(**words: object) -> pb.ListedUser:
    made = pb.ListedUser()
    made.CopyFrom(ROW)
    for name, value in words.items():
        if isinstance(value, list):
            del getattr(made, name)[:]
            getattr(made, name).extend(value)
        else:
            setattr(made, name, value)
    return made


def test_states() -> None:
    """Each row has one word, for its most pressing state."""
    assert settled(row()) and state_of(row()) == "confirmed"
    assert [
        state_of(row(confirmed=["a"], refused=["b: taken"])),
        state_of(row(confirmed=[], refused=["a: taken"])),
        state_of(row(confirmed=[])),
        state_of(row(confirmed=[], pending=True)),
        state_of(row(leaving=["a"])),
        state_of(row(leaving=["a"], pending=True)),
        state_of(row(shortened=True)),
    ] == ["partly", "refused", "unconfirmed", "pending", "leaving", "pending", "unknown"]
    assert not any(map(settled, (row(confirmed=["a"]), row(leaving=["a"]), row(pending=True), row(shortened=True))))


def test_cells() -> None:
    """A wide row has the names of proxies, never their values."""
    full = row(refused=["a: x", "b: y"], unknown=["far"])
    full.proxies.trojan.password = "secret"
    assert list(cells(full)) == ["ann", "a, b", "confirmed", "a: x; b: y"]
    assert list(cells(full, wide=True))[4:] == ["a, b", "", "far", "trojan"]


def test_cells_with_weights() -> None:
    """Users without a quota have none of both counts; a barred user has used at least their quota."""
    weighed = row(used_up=1024, used_down=1024, weighted_up=2048, weighted_down=0)
    assert list(cells(weighed, wide=True, weighted=True))[4:7] == ["2.0 KiB", "2.0 KiB", "a, b"]
    assert list(cells(row(), weighted=True))[4:] == ["", ""]
    quota = pb.Limits(bytes=pb.Quota(bytes=3072, way=pb.Quota.DOWN))
    state = pb.LimitState(name="ann", limits=quota, used_down=2048, weighted_up=0, weighted_down=4096)
    assert list(_limits_of(state, weighted=True))[2:5] == ["4.0 KiB", "2.0 KiB", "3.0 KiB"]
    assert list(_limits_of(pb.LimitState(name="bob"), weighted=True))[2:5] == ["", "", ""]
    assert len(_limits_of(state)) == len(_LIMITS) == len(_limits_of(state, weighted=True)) - 1


def test_users_who_are_not_confirmed() -> None:
    """Users with an unsettled row, and users without a row."""
    found = not_in(
        [person("Ann"), person("bob"), person("cid")], [ROW, row(name="bob", confirmed=[], refused=["a: no"])]
    )
    assert found.keys() == {"bob", "cid"} and found["bob"] == "a: no"
    assert missing(["ANN", "x"], [ROW]) == ["x"]


# Credentials


def test_new_credentials() -> None:
    """VLESS and VMess share an id; the node uses a key of the right length as it is; no two are the same."""
    for method, size in KEY_BYTES.items():
        made = new_proxies("f", method)
        key = made.shadowsocks.password
        assert len(shadowsocks_2022_key(key, size)) == size
        assert base64.b64encode(shadowsocks_2022_key(key, size)).decode() == key
        assert made.shadowsocks.method == ""
    assert (made.vless.id, made.vless.flow) == (made.vmess.id, "f")
    assert made.trojan.password == made.hysteria.auth
    assert new_proxies(method="aes-128-gcm").shadowsocks.method == "aes-128-gcm"
    assert len({new_proxies().vless.id for _ in range(10)}) == 10
    tunnel, private = new_tunnel(["10.0.0.2"])
    assert len(tunnel.public_key) == len(private) == 44 and tunnel.public_key != private
    assert list(tunnel.peer_ips) == ["10.0.0.2"]


def test_documents_have_no_secrets() -> None:
    """The output of `diff` may be logged."""
    found = replace(difference([person("ann", "secret")], rows(node_with(person("ann", "hidden")))))
    assert "secret" not in str(found.document) and "hidden" not in str(found.document)
