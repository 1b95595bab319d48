"""Users: who is in force after each of the three ways to say so, and what it costs everybody else."""

from __future__ import annotations

import hashlib
import queue
import select
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from protos.service_pb2 import (
    Empty,
    GetLimitsRequest,
    Limits,
    ListedUser,
    ListUsersRequest,
    Proxy,
    Quota,
    SetLimitsRequest,
    Shadowsocks,
    Trojan,
    User,
    UserLimits,
    Users,
    UsersChunk,
    Vless,
)
from scripts.staging import transfer
from tests.conformance import registry
from tests.conformance.context import Context
from tests.conformance.registry import Level, State
from tests.conformance.stage import SHADOWSOCKS, TROJAN, VLESS
from tests.conformance.wire import Refused

check = partial(registry.check, "users")

REFUSED_USERS = ("failed to update users", "user sync failed")


def bad(context: Context) -> User:
    """Nobody can be let in with this: the id is none, and the name would be taken for a counter's."""
    return User(email="x>>>y", proxies=Proxy(vless=Vless(id="no-uuid" * 9)), inbounds=[VLESS])


@check("users.start", Level.CONTROLLERS)
def of_start(context: Context) -> None:
    """Users of a Start get in through each inbound that they have, others stay out."""
    for tag in context.stage.doors:
        context.comes_in(context.anna, tag)
    context.stays_out(context.bert)


@check("users.sync-user", Level.CONTROLLERS)
def sync_user(context: Context) -> None:
    """SyncUser adds a user, changes the inbounds of one, and removes one that has none."""
    context.sync(context.member(context.bert))
    context.comes_in(context.bert)
    context.comes_in(context.bert, TROJAN)
    context.sync(context.member(context.bert, TROJAN))
    context.stays_out(context.bert)
    context.comes_in(context.bert, TROJAN)
    context.sync(context.gone(context.bert))
    context.stays_out(context.bert, TROJAN)
    context.comes_in(context.anna)


@check("users.sync-user-stream", Level.CONTROLLERS, ["grpc"])
def sync_user_stream(context: Context) -> None:
    """On an open stream each user is in force as it arrives."""
    with stream(context) as send:
        send(context.member(context.bert))
        context.comes_in(context.bert)
        send(context.gone(context.bert))
        context.stays_out(context.bert)


@check("users.bad-one", Level.CONTROLLERS, ["grpc"])
def bad_one(context: Context) -> None:
    """A user who cannot be let in does not end the stream; the next one is in force."""
    with stream(context) as send:
        send(bad(context))
        send(context.member(context.bert))
        context.comes_in(context.bert)


@contextmanager
def stream(context: Context) -> Iterator[Callable[[User], None]]:
    """A SyncUser call that stays open. It must not have ended when the block does."""
    waiting: queue.Queue[User | None] = queue.Queue()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(context.rpc.rpc.SyncUser, iter(waiting.get, None))
        try:
            yield waiting.put
            assert not call.done(), f"the node ended the stream: {call.exception()}"
        finally:
            waiting.put(None)


@check("users.sync-users", Level.CONTROLLERS)
def sync_users(context: Context) -> None:
    """SyncUsers replaces the whole set."""
    context.replace(context.member(context.bert))
    context.comes_in(context.bert)
    context.stays_out(context.anna)


@check("users.sync-users-post", Level.CONTROLLERS, ["rest"])
def sync_users_post(context: Context) -> None:
    """Over REST SyncUsers is taken as POST, too."""
    users = Users(users=[context.member(context.bert)])
    response = context.rest.rest.call("POST", "/users/sync", users)
    assert response.status == 200, f"{response.status}: {response.text}"
    context.comes_in(context.bert)


@check("users.chunked", Level.CONTROLLERS)
def chunked(context: Context) -> None:
    """SyncUsersChunked adds, changes and removes those whom it carries, and leaves all others."""
    context.sync(context.member(context.bert))
    parts = [[context.gone(context.bert)], [], [context.member(context.cora)]]
    context.node.call("SyncUsersChunked", *chunks(*parts))
    context.comes_in(context.cora)
    context.comes_in(context.anna)
    context.stays_out(context.bert)


@check("users.chunked-empty", Level.BEYOND)
def chunked_empty(context: Context) -> None:
    """An empty last chunk alone succeeds, and changes nothing."""
    context.node.call("SyncUsersChunked", UsersChunk(last=True))
    context.comes_in(context.anna)


@check("users.chunked-broken", Level.CONTROLLERS)
def chunked_broken(context: Context) -> None:
    """Chunks without one in between, or without a last one, are refused; nobody of them gets in."""
    first, last = chunks([context.member(context.bert)], [context.member(context.cora)])
    for parts in ([first], [last], [first, UsersChunk(users=last.users, index=2, last=True)]):
        try:
            context.node.call("SyncUsersChunked", *parts)
        except Refused:
            continue
        raise AssertionError(f"chunks {[part.index for part in parts]} are taken, last: {parts[-1].last}")
    context.stays_out(context.bert)


def chunks(*parts: list[User]) -> list[UsersChunk]:
    last = len(parts) - 1
    return [UsersChunk(users=users, index=index, last=index == last) for index, users in enumerate(parts)]


@check("users.unknown-tags", Level.CONTROLLERS)
def unknown_tags(context: Context) -> None:
    """Tags of other nodes are ignored, in any order; a user who has only such is out."""
    bert = context.member(context.bert)
    bert.inbounds[:] = ["of another", *reversed(bert.inbounds), "and one more"]
    context.sync(bert)
    context.comes_in(context.bert)
    bert.inbounds[:] = ["of another"]
    context.sync(bert)
    context.stays_out(context.bert)


@check("users.empty-credential", Level.CONTROLLERS)
def empty_credential(context: Context) -> None:
    """An empty password is none: nobody gets in with it, and the user's other inbounds are open."""
    bert = context.member(context.bert)
    bert.proxies.trojan.CopyFrom(Trojan())
    context.sync(bert)
    context.comes_in(context.bert)
    assert not trojan_opens(context, ""), "the empty password opens the Trojan inbound"


def trojan_opens(context: Context, password: str) -> bool:
    """Whether Trojan's own words lead to the echo server; no client takes an empty password."""
    options, echo = context.stage.options, context.stage.echo
    secret = hashlib.sha224(password.encode()).hexdigest().encode()
    place = socket.inet_aton(socket.gethostbyname(echo.host)) + echo.port.to_bytes(2)
    with socket.create_connection((options.clients, context.stage.ports[TROJAN]), 2) as link:
        link.sendall(secret + b"\r\n\1\1" + place + b"\r\necho 5\nhello")
        try:
            return link.recv(5) == b"hello"
        except OSError:
            return False


@check("users.shadowsocks-2022", Level.CONTROLLERS)
def shadowsocks_2022(context: Context) -> None:
    """A Shadowsocks-2022 key is made of the password as controllers make it; one that is a key already stays."""
    context.comes_in(context.anna, SHADOWSOCKS)
    key = context.stage.doors[SHADOWSOCKS].protocol.account(context.bert)["password"]
    bert = context.member(context.bert)
    bert.proxies.shadowsocks.CopyFrom(Shadowsocks(password=key))
    context.sync(bert)
    context.comes_in(context.bert, SHADOWSOCKS)


@check("users.refused-named", Level.BEYOND)
def refused_named(context: Context) -> None:
    """A user who cannot be let in is told by name, in words that controllers know; all others are in force."""
    for name, call in _ways(context).items():
        try:
            call([bad(context), context.member(context.bert)])
        except Refused as error:
            assert error.status in ("500", "INTERNAL"), str(error)
            assert error.text.startswith(REFUSED_USERS), str(error)
            assert bad(context).email in error.text, str(error)
        else:
            raise AssertionError(f"{name} succeeds with a user who cannot be let in")
        context.comes_in(context.bert)


@check("users.others-stay", Level.BEYOND)
def others_stay(context: Context) -> None:
    """Nobody is disconnected when another user comes, changes or goes, in any way to say so."""
    anna = context.member(context.anna)
    with context.connect(context.anna) as link:
        steps = context.member(context.bert), context.member(context.bert, TROJAN), context.gone(context.bert)
        for name, call in _ways(context).items():
            for bert in steps:
                call([anna, bert])
                transfer.small_echo(link, name.encode())


@check("users.removed-live", Level.BEYOND)
def removed_live(context: Context) -> None:
    """The open connections of a removed user end, in any way to say so."""
    for name, call in _ways(context).items():
        context.sync(context.member(context.bert))
        with context.connect(context.bert) as link:
            call([context.member(context.anna), context.gone(context.bert)])
            readable, _, _ = select.select([link], [], [], context.stage.options.patience)
            assert readable, f"a connection outlives {name}"


@check("users.changed-live", Level.BEYOND)
def changed_live(context: Context) -> None:
    """The open connections of a user whose credential changed end, and the old credential opens nothing."""
    changed = context.member(context.anna)
    changed.proxies.CopyFrom(context.member(context.cora).proxies)
    with context.connect(context.anna) as link:
        context.sync(changed)
        readable, _, _ = select.select([link], [], [], context.stage.options.patience)
        assert readable, "a connection outlives the credential"
    context.stays_out(context.anna)
    context.comes_in(context.cora)


@check("users.listed", Level.BEYOND)
def listed(context: Context) -> None:
    """ListUsers tells who is wanted, what is confirmed of it and why somebody is not in, a page at a time."""
    worse = context.member(context.bert)
    worse.proxies.Clear()
    context.sync(worse)
    rows: dict[str, ListedUser] = {}
    after = ""
    while not rows or after:
        page = context.node.call("ListUsers", ListUsersRequest(after=after, limit=1))
        assert len(page.users) <= 1 and page.total == 2, f"a page of one: {page}"
        rows |= {row.name: row for row in page.users}
        after = page.next
    anna, bert = rows[context.anna.email], rows[context.bert.email]
    assert set(anna.confirmed) == set(anna.inbounds) != set(), f"not confirmed: {anna}"
    assert not bert.confirmed and bert.refused and not anna.refused, f"no credential, and no reason: {bert}"
    context.sync(context.gone(context.bert))
    assert context.node.call("ListUsers", ListUsersRequest()).total == 1


@check("users.limited", Level.BEYOND)
def limited(context: Context) -> None:
    """SetLimits puts out who has used up a quota or whose time is over, and lets them in again; GetLimits tells."""
    name = context.anna.email

    def say(limits: Limits | None) -> None:
        word = UserLimits(name=name, limits=limits)
        context.node.call("SetLimits", SetLimitsRequest(users=[word]))

    try:
        say(Limits(expires_at=1))
        (row,) = context.node.call("GetLimits", GetLimitsRequest(names=[name])).users
        assert row.name == name and list(row.off_for) == ["expiry"], f"the user's time is over: {row}"
        context.stays_out(context.anna)
        say(Limits(bytes=Quota(bytes=10**12)))
        context.comes_in(context.anna)
        (row,) = context.node.call("GetLimits", GetLimitsRequest(names=[name])).users
        assert row.left and not row.off_for, f"there is much left: {row}"
    finally:
        say(None)
    assert not context.node.call("GetLimits", GetLimitsRequest()).users


@check("users.stopped", Level.BEYOND, state=State.STOPPED)
def stopped(context: Context) -> None:
    """Without a backend every change of users is refused with `backend not initialized`."""
    for name, call in _ways(context).items():
        try:
            call([context.member(context.anna)])
        except Refused as error:
            assert "backend not initialized" in error.text, f"{name}: {error}"
        else:
            raise AssertionError(f"{name} succeeds, and nothing runs")
    assert not context.node.call("GetBaseInfo", Empty()).running


def _ways(context: Context) -> dict[str, Callable[[list[User]], object]]:
    """The three ways to say who the users are."""
    return {
        "SyncUser": lambda users: context.sync(*users),
        "SyncUsers": lambda users: context.replace(*users),
        "SyncUsersChunked": lambda users: context.node.call("SyncUsersChunked", *chunks(users)),
    }
