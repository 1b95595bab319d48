"""Checks of statistics: traffic for bills, online users, and the state of machine and core."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from protos.service_pb2 import (
    BillRequest,
    Empty,
    Inbound,
    Inbounds,
    ListOnlineRequest,
    Outbound,
    Outbounds,
    StatRequest,
    StatType,
    UsersStat,
    UserStat,
)
from scripts.staging import transfer
from tests.conformance import registry
from tests.conformance.context import Context, Traffic
from tests.conformance.registry import Level, State
from tests.conformance.stage import SOURCE
from tests.conformance.wire import Refused

check = partial(registry.check, "statistics")

# Bytes that Xray may leave out of an inbound's downlink for each connection.
LEFT_OUT = 8192


def collected(context: Context, kind: StatType, name: str, expected: Traffic, one: bool = False) -> None:
    """Read with reset, as controllers do, until all bytes are counted; fail if there are more, then or later."""
    total = Traffic()

    def ask() -> bool:
        nonlocal total
        total += context.counted(kind, name if one else "", reset=True, of=name)
        return total.up >= expected.up and total.down >= expected.down

    context.soon(ask, f"{expected} are counted")
    ask()
    assert total == expected, f"{total} counted, expected {expected}"


@check("stats.users", Level.CONTROLLERS, state=State.UNCOUNTED)
def users(context: Context) -> None:
    """Several UsersStat with reset return every byte of a user exactly once, under their name."""
    expected = context.traffic(context.anna) + context.traffic(context.anna)
    collected(context, UsersStat, context.anna.email, expected)


@check("stats.user", Level.CONTROLLERS, state=State.UNCOUNTED)
def user(context: Context) -> None:
    """UserStat returns one user's bytes; a reset sets them to zero, a call without one does not."""
    expected = context.traffic(context.anna)
    name = context.anna.email
    context.soon(lambda: context.counted(UserStat, name) == expected, f"{expected} are counted")
    assert context.counted(UserStat, name) == expected
    collected(context, UserStat, name, expected, one=True)
    assert context.counted(UserStat, name) == Traffic()


@check("stats.outbounds", Level.CONTROLLERS, state=State.UNCOUNTED)
def outbounds(context: Context) -> None:
    """Outbounds and Outbound return every byte of an outbound exactly once, under its tag."""
    _, outbound = _own_tags(context)
    expected = context.traffic(context.anna)
    context.soon(lambda: context.counted(Outbound, outbound) == expected, f"{expected} are counted")
    collected(context, Outbounds, outbound, expected)


@check("stats.inbounds", Level.CONTROLLERS, state=State.UNCOUNTED)
def inbounds(context: Context) -> None:
    """Inbounds and Inbound return an inbound's bytes; a core may leave out 8,192 of a connection's downlink."""
    inbound, _ = _own_tags(context)
    least = context.traffic(context.anna)

    def reached(counted: Callable[[], Traffic]) -> Callable[[], bool]:
        return lambda: counted().up >= least.up and counted().down >= least.down - LEFT_OUT

    context.soon(reached(lambda: context.counted(Inbound, inbound)), f"{least} are counted")
    context.soon(reached(lambda: context.counted(Inbounds, "", of=inbound)), f"{least} are counted")


def _own_tags(context: Context) -> tuple[str, str]:
    """Start a core with new tags, for which nothing was counted before."""
    inbound, outbound = f"in {context.anna.email}", f"out {context.anna.email}"
    anna = context.member(context.anna)
    anna.inbounds.append(inbound)
    context.node.call("Start", context.stage.renamed(context.stage.backend([anna]), inbound, outbound))
    return inbound, outbound


@check("stats.over-stop", Level.BEYOND, state=State.UNCOUNTED)
def over_stop(context: Context) -> None:
    """Unread bytes survive a Stop and a Start, to the byte."""
    expected = context.traffic(context.anna)
    context.stop()
    context.start(context.member(context.anna))
    expected += context.traffic(context.anna)
    collected(context, UsersStat, context.anna.email, expected)


@check("stats.removed", Level.BEYOND, state=State.UNCOUNTED)
def removed(context: Context) -> None:
    """The bytes of a user are still reported after their removal."""
    expected = context.traffic(context.anna)
    context.sync(context.gone(context.anna))
    collected(context, UsersStat, context.anna.email, expected)


@check("stats.stopped", Level.BEYOND, state=State.UNCOUNTED)
def stopped(context: Context) -> None:
    """Counted bytes can be read while nothing runs."""
    expected = context.traffic(context.anna)
    context.stop()
    collected(context, UsersStat, context.anna.email, expected)


@check("online", Level.CONTROLLERS)
def online(context: Context) -> None:
    """A connected user is online, with address and time; one who is not connected has none."""
    anna, bert = (StatRequest(name=person.email) for person in (context.anna, context.bert))
    context.sync(context.member(context.bert))
    with context.connect(context.anna):
        context.soon(lambda: context.node.call("GetUserOnlineStats", anna).value == 1, "one connection is online")
        ips = context.soon(lambda: dict(context.node.call("GetUserOnlineIpListStats", anna).ips), "an address")
        assert _absent(context, bert), "a user who never connected is online"
    [(address, seen)] = ips.items()
    assert address == SOURCE or not context.stage.options.local, f"the address is {address}, expected {SOURCE}"
    assert abs(seen - time.time()) < 300, f"last seen at {seen}, more than 300 s from now"


def _absent(context: Context, request: StatRequest) -> bool:
    """Whether the reply is empty or an error for an unknown user: cores differ."""
    try:
        return bool(context.node.call("GetUserOnlineStats", request).value == 0)
    except Refused:
        return True


@check("online.leaves", Level.BEYOND)
def leaves(context: Context) -> None:
    """A user who has disconnected is no longer online, and one who never connected has 0."""
    anna, bert = (StatRequest(name=person.email) for person in (context.anna, context.bert))
    context.sync(context.member(context.bert))
    with context.connect(context.anna):
        context.soon(lambda: context.node.call("GetUserOnlineStats", anna).value == 1, "one connection is online")
    context.soon(lambda: context.node.call("GetUserOnlineStats", anna).value == 0, "nobody is online")
    assert context.node.call("GetUserOnlineStats", bert).value == 0
    assert not context.node.call("GetUserOnlineIpListStats", bert).ips


@check("online.listed", Level.BEYOND)
def listed(context: Context) -> None:
    """ListOnline returns, page by page, all users online with their addresses, and no others."""
    context.sync(context.member(context.bert), context.member(context.cora))
    with context.connect(context.anna), context.connect(context.bert):
        found = context.soon(lambda: len(online := _online(context)) == 2 and online, "two users are online")
    assert found.keys() == {context.anna.email, context.bert.email}, f"others are online: {found}"
    assert all(found.values()), f"users online have no address: {found}"
    context.soon(lambda: not _online(context), "no user is online")


def _online(context: Context) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    after, more = "", True
    while more:
        page = context.node.call("ListOnline", ListOnlineRequest(after=after, limit=1))
        assert len(page.users) <= 1, f"not a page of one user: {page}"
        found |= {user.name: set(user.ips) for user in page.users}
        after, more = page.next, bool(page.next)
    return found


@check("stats.bill", Level.BEYOND)
def billed(context: Context) -> None:
    """GetBill has the bytes of users once, whatever is reset, and refuses an invalid date."""
    before = context.node.call("GetBill", BillRequest()).users
    with context.connect(context.anna) as link:
        transfer.download(link, 100_000)
    context.node.call("GetStats", StatRequest(type=UsersStat, reset=True))
    after = context.node.call("GetBill", BillRequest()).users
    assert 100_000 <= after.sent - before.sent < 110_000, f"not the bytes of one download: {before}, {after}"
    try:
        context.node.call("GetBill", BillRequest(since="yesterday"))
    except Refused as error:
        assert error.status in ("400", "INVALID_ARGUMENT"), str(error)
    else:
        raise AssertionError("GetBill succeeds for an invalid date")


@check("stats.unknown-name", Level.BEYOND)
def unknown_name(context: Context) -> None:
    """An unknown name is refused with 404 or NOT_FOUND."""
    for name, kind in (("GetStats", UserStat), ("GetStats", Outbound), ("GetUserOnlineStats", UserStat)):
        try:
            context.node.call(name, StatRequest(name="nobody at all", type=kind))
        except Refused as error:
            assert error.status in ("404", "NOT_FOUND"), str(error)
        else:
            raise AssertionError(f"{name} succeeds for an unknown name")


@check("stats.system", Level.CONTROLLERS)
def system(context: Context) -> None:
    """GetSystemStats returns memory and processors."""
    reply = context.node.call("GetSystemStats", Empty())
    assert 0 < reply.mem_used <= reply.mem_total, f"memory: {reply.mem_used} of {reply.mem_total}"
    assert reply.cpu_cores > 0
    assert 0 <= reply.cpu_usage <= 100 * reply.cpu_cores


@check("stats.system-stopped", Level.BEYOND)
def system_stopped(context: Context) -> None:
    """GetSystemStats works without a core, too."""
    context.stop()
    system(context)


@check("stats.backend", Level.CONTROLLERS)
def backend(context: Context) -> None:
    """GetBackendStats returns the core's state: controllers call it every ten seconds as a health check."""
    reply = context.node.call("GetBackendStats", Empty())
    assert reply.num_goroutine > 0, "no goroutines"
    assert reply.sys > 0, "no memory"
