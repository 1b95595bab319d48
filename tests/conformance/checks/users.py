"""Checks of users: the effect of each of the three ways to send them, and that other users stay connected."""

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
    DropConnectionsRequest,
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
    """A user whom no core accepts: the id is invalid, and the name looks like a counter's."""
    return User(email="x>>>y", proxies=Proxy(vless=Vless(id="no-uuid" * 9)), inbounds=[VLESS])


@check("users.start", Level.CONTROLLERS)
def of_start(context: Context) -> None:
    """Users of a Start can connect to each of their inbounds, others cannot."""
    for tag in context.stage.doors:
        context.comes_in(context.anna, tag)
    context.stays_out(context.bert)


@check("users.sync-user", Level.CONTROLLERS)
def sync_user(context: Context) -> None:
    """SyncUser adds a user, changes a user's inbounds, and removes a user without inbounds."""
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
    """On an open stream each user takes effect on arrival."""
    with stream(context) as send:
        send(context.member(context.bert))
        context.comes_in(context.bert)
        send(context.gone(context.bert))
        context.stays_out(context.bert)


@check("users.bad-one", Level.CONTROLLERS, ["grpc"])
def bad_one(context: Context) -> None:
    """An unusable user does not end the stream; the next one takes effect."""
    with stream(context) as send:
        send(bad(context))
        send(context.member(context.bert))
        context.comes_in(context.bert)


@contextmanager
def stream(context: Context) -> Iterator[Callable[[User], None]]:
    """An open SyncUser call, which the node must not end before the block does."""
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
    """SyncUsers replaces all users."""
    context.replace(context.member(context.bert))
    context.comes_in(context.bert)
    context.stays_out(context.anna)


@check("users.sync-users-post", Level.CONTROLLERS, ["rest"])
def sync_users_post(context: Context) -> None:
    """Over REST the node accepts SyncUsers as POST, too."""
    users = Users(users=[context.member(context.bert)])
    response = context.rest.rest.call("POST", "/users/sync", users)
    assert response.status == 200, f"{response.status}: {response.text}"
    context.comes_in(context.bert)


@check("users.chunked", Level.CONTROLLERS)
def chunked(context: Context) -> None:
    """SyncUsersChunked adds, changes and removes its users, and leaves all others."""
    context.sync(context.member(context.bert))
    parts = [[context.gone(context.bert)], [], [context.member(context.cora)]]
    context.node.call("SyncUsersChunked", *chunks(*parts))
    context.comes_in(context.cora)
    context.comes_in(context.anna)
    context.stays_out(context.bert)


@check("users.chunked-empty", Level.BEYOND)
def chunked_empty(context: Context) -> None:
    """A single empty last chunk succeeds, and changes nothing."""
    context.node.call("SyncUsersChunked", UsersChunk(last=True))
    context.comes_in(context.anna)


@check("users.chunked-broken", Level.CONTROLLERS)
def chunked_broken(context: Context) -> None:
    """Chunks with a gap, or without a last one, are refused; none of their users can connect."""
    first, last = chunks([context.member(context.bert)], [context.member(context.cora)])
    for parts in ([first], [last], [first, UsersChunk(users=last.users, index=2, last=True)]):
        try:
            context.node.call("SyncUsersChunked", *parts)
        except Refused:
            continue
        raise AssertionError(f"chunks {[part.index for part in parts]} are accepted, last: {parts[-1].last}")
    context.stays_out(context.bert)


def chunks(*parts: list[User]) -> list[UsersChunk]:
    last = len(parts) - 1
    return [UsersChunk(users=users, index=index, last=index == last) for index, users in enumerate(parts)]


@check("users.unknown-tags", Level.CONTROLLERS)
def unknown_tags(context: Context) -> None:
    """Tags of other nodes are ignored, in any order; a user with only such tags cannot connect."""
    bert = context.member(context.bert)
    bert.inbounds[:] = ["of another", *reversed(bert.inbounds), "and one more"]
    context.sync(bert)
    context.comes_in(context.bert)
    bert.inbounds[:] = ["of another"]
    context.sync(bert)
    context.stays_out(context.bert)


@check("users.empty-credential", Level.CONTROLLERS)
def empty_credential(context: Context) -> None:
    """An empty password is no credential: no client can connect with it; the user's other inbounds work."""
    bert = context.member(context.bert)
    bert.proxies.trojan.CopyFrom(Trojan())
    context.sync(bert)
    context.comes_in(context.bert)
    assert not trojan_opens(context, ""), "the empty password opens the Trojan inbound"


def trojan_opens(context: Context, password: str) -> bool:
    """Whether raw Trojan bytes reach the echo server; client cores refuse an empty password."""
    context.need_traffic()
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
    """A Shadowsocks-2022 key is derived from the password as controllers do it; a valid key is used unchanged."""
    context.comes_in(context.anna, SHADOWSOCKS)
    key = context.stage.doors[SHADOWSOCKS].protocol.account(context.bert)["password"]
    bert = context.member(context.bert)
    bert.proxies.shadowsocks.CopyFrom(Shadowsocks(password=key))
    context.sync(bert)
    context.comes_in(context.bert, SHADOWSOCKS)


@check("users.refused-named", Level.BEYOND)
def refused_named(context: Context) -> None:
    """An unusable user is named in an error that controllers know; all others take effect."""
    for name, call in _ways(context).items():
        try:
            call([bad(context), context.member(context.bert)])
        except Refused as error:
            assert error.status in ("500", "INTERNAL"), str(error)
            assert error.text.startswith(REFUSED_USERS), str(error)
            assert bad(context).email in error.text, str(error)
        else:
            raise AssertionError(f"{name} succeeds with an unusable user")
        context.comes_in(context.bert)


@check("users.others-stay", Level.BEYOND)
def others_stay(context: Context) -> None:
    """Adding, changing or removing a user disconnects no other, in each of the three ways."""
    anna = context.member(context.anna)
    with context.connect(context.anna) as link:
        steps = context.member(context.bert), context.member(context.bert, TROJAN), context.gone(context.bert)
        for name, call in _ways(context).items():
            for bert in steps:
                call([anna, bert])
                transfer.small_echo(link, name.encode())


@check("users.removed-live", Level.BEYOND)
def removed_live(context: Context) -> None:
    """The open connections of a removed user end, in each of the three ways."""
    for name, call in _ways(context).items():
        context.sync(context.member(context.bert))
        with context.connect(context.bert) as link:
            call([context.member(context.anna), context.gone(context.bert)])
            readable, _, _ = select.select([link], [], [], context.stage.options.patience)
            assert readable, f"a connection survives the removal by {name}"


@check("users.changed-live", Level.BEYOND)
def changed_live(context: Context) -> None:
    """A changed credential ends the user's open connections, and the old credential is refused."""
    changed = context.member(context.anna)
    changed.proxies.CopyFrom(context.member(context.cora).proxies)
    with context.connect(context.anna) as link:
        context.sync(changed)
        readable, _, _ = select.select([link], [], [], context.stage.options.patience)
        assert readable, "a connection survives the change of its credential"
    context.stays_out(context.anna)
    context.comes_in(context.cora)


@check("users.listed", Level.BEYOND)
def listed(context: Context) -> None:
    """ListUsers returns, page by page, each user's wanted and confirmed inbounds and the reasons of refusals."""
    worse = context.member(context.bert)
    worse.proxies.Clear()
    context.sync(worse)
    rows: dict[str, ListedUser] = {}
    after = ""
    while not rows or after:
        page = context.node.call("ListUsers", ListUsersRequest(after=after, limit=1))
        assert len(page.users) <= 1 and page.total == 2, f"not a page of one user: {page}"
        rows |= {row.name: row for row in page.users}
        after = page.next
    anna, bert = rows[context.anna.email], rows[context.bert.email]
    assert set(anna.confirmed) == set(anna.inbounds) != set(), f"not confirmed: {anna}"
    assert not bert.confirmed and bert.refused and not anna.refused, (
        f"a user without a credential has no reason: {bert}"
    )
    context.sync(context.gone(context.bert))
    assert context.node.call("ListUsers", ListUsersRequest()).total == 1


@check("users.limited", Level.BEYOND)
def limited(context: Context) -> None:
    """SetLimits bars users over their quota or expiry, and admits them again; GetLimits reports it."""
    name = context.anna.email

    def say(limits: Limits | None) -> None:
        word = UserLimits(name=name, limits=limits)
        context.node.call("SetLimits", SetLimitsRequest(users=[word]))

    try:
        say(Limits(expires_at=1))
        (row,) = context.node.call("GetLimits", GetLimitsRequest(names=[name])).users
        assert row.name == name and list(row.off_for) == ["expiry"], f"an expired user is not reported as such: {row}"
        context.stays_out(context.anna)
        say(Limits(bytes=Quota(bytes=10**12)))
        context.comes_in(context.anna)
        (row,) = context.node.call("GetLimits", GetLimitsRequest(names=[name])).users
        assert row.left and not row.off_for, f"a user with quota left is barred: {row}"
    finally:
        say(None)
    assert not context.node.call("GetLimits", GetLimitsRequest()).users


@check("users.dropped", Level.BEYOND)
def dropped(context: Context) -> None:
    """DropConnections ends the connections of one user and no others, and the user comes back at once."""
    context.sync(context.member(context.bert))
    with context.connect(context.anna) as link, context.connect(context.bert) as other:
        reply = context.node.call("DropConnections", DropConnectionsRequest(name=context.anna.email))
        # Earlier connections of hers may not be over yet.
        assert reply.ended and reply.users == 1, f"not the connections of one user: {reply}"
        assert select.select([link], [], [], context.stage.options.patience)[0], "a dropped connection goes on"
        transfer.echo(other, b"still there")
        assert context.is_in(context.anna), "a dropped user does not come back"
    for request, statuses in (
        (DropConnectionsRequest(name="nobody at all"), ("404", "NOT_FOUND")),
        (DropConnectionsRequest(inbound="no inbound"), ("404", "NOT_FOUND")),
        (DropConnectionsRequest(address="no address"), ("400", "INVALID_ARGUMENT")),
        (DropConnectionsRequest(), ("400", "INVALID_ARGUMENT")),
    ):
        try:
            context.node.call("DropConnections", request)
        except Refused as error:
            assert error.status in statuses, str(error)
        else:
            raise AssertionError(f"DropConnections succeeds for {request}")


@check("users.stopped", Level.BEYOND, state=State.STOPPED)
def stopped(context: Context) -> None:
    """Without a backend every change of users is refused with `backend not initialized`."""
    for name, call in _ways(context).items():
        try:
            call([context.member(context.anna)])
        except Refused as error:
            assert "backend not initialized" in error.text, f"{name}: {error}"
        else:
            raise AssertionError(f"{name} succeeds although nothing runs")
    assert not context.node.call("GetBaseInfo", Empty()).running


def _ways(context: Context) -> dict[str, Callable[[list[User]], object]]:
    """The three ways to send users."""
    return {
        "SyncUser": lambda users: context.sync(*users),
        "SyncUsers": lambda users: context.replace(*users),
        "SyncUsersChunked": lambda users: context.node.call("SyncUsersChunked", *chunks(users)),
    }
