"""Quotas and expiry with real traffic: users over a limit are cut, no other user is affected, and they can return."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from protos.service_pb2 import (
    TELL,
    Limits,
    LimitState,
    Quota,
    SetLimitsResponse,
    User,
)
from scripts.staging import transfer
from scripts.staging.controller import Controller, ControllerError
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, gets_in, member, over, run, settled, stays_out, talking
from tests.harness.grounds import Ground

MIB = 1024**2
# The most that a user may exceed their quota by.
OVER = 16 * MIB
# Seconds until a reached limit is enforced, on a machine that runs other tests.
SOON = 5.0


def limited(person: TestUser, limits: Limits, *places: Place) -> User:
    """The user with their own limits."""
    user = member(person, *places)
    user.limits.CopyFrom(limits)
    return user


def say(controller: Controller, person: TestUser, limits: Limits | None) -> SetLimitsResponse:
    """SetLimits of one user."""
    return controller.set_limits({person.email: limits})


def told(controller: Controller, person: TestUser) -> LimitState:
    """GetLimits of one user."""
    (row,) = controller.limits(person.email).users
    return row


def quota(size: int, **words: object) -> Limits:
    return Limits(bytes=Quota(bytes=size, **words))  # type: ignore[arg-type]


def greedy(link: socket.socket, speed: float = 20e6) -> int:
    """Download at so many bytes a second until the connection ends. Returns the bytes received.

    Xray's client with splice may not report that its connection was reset until it sends something.
    """
    link.settimeout(1)
    link.sendall(b"give %d\n" % 2**40)
    came, began = 0, time.monotonic()
    for _ in range(10):
        with suppress(TimeoutError, ConnectionError):
            while block := link.recv(MIB):
                came += len(block)
                time.sleep(max(0.0, began + came / speed - time.monotonic()))
            return came
        try:
            link.sendall(b"echo 0\n")
        except ConnectionError:
            return came
    raise TimeoutError("the connection does not end")


@contextmanager
def backend(
    node: NodeProcess, ground: Ground, kind: Kind, cover: CoverServer, transport: str, *users: Callable[[Place], User]
) -> Iterator[tuple[Controller, Place]]:
    """A Start with one inbound and these users."""
    place = Place(kind, "in", ground=ground)
    with control(node, transport) as controller:
        with settled([place], cover):
            run(controller, [place], [user(place) for user in users])
        yield controller, place


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["rest", "grpc"])
@pytest.mark.each_once("transport", "ground")
def test_over_the_quota_is_out(
    ground: Ground, transport: str, node: NodeProcess, all_kinds: dict[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """The download is cut and new connections are refused; no other user is affected; a larger quota readmits them."""
    anna, bert = TestUser.new("Anna@test"), TestUser.new("bert@test")
    kind = all_kinds["vless-raw"]
    people = [lambda place: member(anna, place), lambda place: member(bert, place)]
    with backend(node, ground, kind, cover, transport, *people) as (controller, place):
        assert not say(controller, anna, quota(64 * MIB)).notes
        with connection(place, bert, echo) as other, talking(other), connection(place, anna, echo) as link:
            came = greedy(link)
        until(lambda: told(controller, anna).off_for == ["quota"], SOON, "the user is off")
        row = told(controller, anna)
        assert came <= 64 * MIB + OVER
        assert 64 * MIB <= row.used_up + row.used_down <= 64 * MIB + OVER
        assert (row.name, row.left) == (anna.email, 0)
        assert stays_out(place, anna, echo)
        assert gets_in(place, bert, echo)
        assert controller.info().limits.off_quota == 1
        say(controller, anna, quota(256 * MIB))
        assert gets_in(place, anna, echo)
        assert not told(controller, anna).off_for
        say(controller, anna, None)
        assert not controller.limits().users


@pytest.mark.slow
def test_an_expired_user_is_out(
    ground: Ground, node: NodeProcess, all_kinds: dict[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """A download is cut at the expiry; with TELL an expired user stays; one expired at a Start is never admitted."""
    anna, bert, cora = TestUser.new("anna@test"), TestUser.new("bert@test"), TestUser.new("cora@test")
    past, soon = int(time.time()) - 1, int(time.time()) + 4
    with backend(
        *(node, ground, all_kinds["vless-raw"], cover, "grpc"),
        lambda place: limited(anna, Limits(expires_at=soon), place),
        lambda place: limited(bert, Limits(expires_at=past, expires_action=TELL), place),
        lambda place: limited(cora, Limits(expires_at=past), place),
    ) as (controller, place):
        assert stays_out(place, cora, echo)
        with connection(place, bert, echo) as other, talking(other), connection(place, anna, echo) as link:
            greedy(link)
            late = time.time() - soon
        assert -0.1 < late < SOON
        assert stays_out(place, anna, echo)
        assert controller.info().limits.off_expired == 2
        # The same user with another day, in their own message.
        controller.sync_user(limited(anna, Limits(expires_at=int(time.time()) + 3600), place))
        assert gets_in(place, anna, echo)
        controller.sync_user(member(cora, place))
        assert gets_in(place, cora, echo)


@pytest.mark.slow
def test_limits_outlive_the_node(
    ground: Ground, own_node: NodeProcess, all_kinds: dict[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """After kill -9 barred users are barred once the backend is back, and their use is kept."""
    anna, bert = TestUser.new("anna@test"), TestUser.new("bert@test")
    with backend(
        *(own_node, ground, all_kinds["vless-raw"], cover, "grpc"),
        lambda place: limited(anna, quota(MIB), place),
        lambda place: member(bert, place),
    ) as (controller, place):
        say(controller, bert, quota(1024 * MIB))
        with connection(place, anna, echo) as link:
            greedy(link)
        with connection(place, bert, echo) as link:
            transfer.download(link, 3 * MIB)
        until(lambda: told(controller, bert).used_down >= 3 * MIB, SOON, "it is counted")
        until(lambda: told(controller, anna).off_for == ["quota"], SOON, "the user is off")
        # The node replies after all counts are on disk.
        say(controller, bert, quota(1024 * MIB))
        own_node.kill()
        own_node.start()
        until(lambda: controller.info().running, 20, "the backend is back")
        assert stays_out(place, anna, echo)
        assert gets_in(place, bert, echo)
        assert told(controller, anna).off_for == ["quota"]
        assert told(controller, bert).used_down >= 3 * MIB


@over("rest")
def test_what_cannot_be_meant_is_refused(controller: Controller) -> None:
    """Invalid limits are refused by the user's name, and none is applied."""
    with pytest.raises(ControllerError, match=r"bob.*reset_day"):
        controller.set_limits({"ann": quota(1), "bob": quota(1, reset_day=99)})
    assert not controller.limits("ann", "bob").users
    (note,) = controller.set_limits({"ann": quota(1)}).notes
    assert note.name == "ann" and "not a user" in note.text


def test_defaults_are_the_settings(
    tmp_path: Path, all_kinds: dict[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """Users without own limits get those of the inbound, or of all; their own take precedence."""
    anna, bert, cora = TestUser.new("anna@test"), TestUser.new("bert@test"), TestUser.new("cora@test")
    kind = all_kinds["vless-raw"]
    free, paid = Place(kind, "free"), Place(kind, "paid")
    words = {"LIMITS": "bytes=1GB", "LIMITS_INBOUNDS": "free: bytes=1MB/month"}
    with NodeProcess(tmp_path, **words) as node, control(node, "rest") as controller:
        users = [member(anna, free), member(bert, paid), limited(cora, quota(0), free)]
        run(controller, [free, paid], users)
        for person, place in ((bert, paid), (cora, free)):
            with connection(place, person, echo) as link:
                transfer.download(link, 2 * MIB)
        with connection(free, anna, echo) as link:
            greedy(link)
        until(lambda: told(controller, anna).off_for == ["quota"], SOON, "the user is off")
        assert told(controller, anna).resets_at > time.time()
        assert gets_in(paid, bert, echo) and gets_in(free, cora, echo)
        assert {row.name for row in controller.limits().users} == {anna.email, bert.email}
        controller.set_limits({anna.email: quota(0)})
        assert gets_in(free, anna, echo)
