"""The context of a check: the node over one protocol, three users, and clients through its core."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from typing import Any

from protos.service_pb2 import BaseInfoResponse, Empty, ListUsersRequest, StatRequest, StatType, User, Users
from scripts.staging import transfer
from scripts.staging.echo import EchoServer
from scripts.staging.target import Dialect
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conformance.stage import VLESS, Stage
from tests.conformance.wire import GrpcWire, Refused, RestWire, Wire

# Seconds without a reply after which a user counts as refused.
OUT = 0.5


class LeftOut(Exception):
    """The check cannot go on with this node or these options; the text has the reason. What it tried before held."""


class Context:
    """One for each check. `renamed`: the users have names that were never used before."""

    def __init__(self, stage: Stage, protocol: str, renamed: bool = False) -> None:
        self.stage, self.protocol = stage, protocol
        self.node = self.speak()
        self.anna, self.bert, self.cora = stage.newcomers() if renamed else stage.people

    def speak(self, key: str | None = None, dialect: Dialect = "x-api-key") -> Wire:
        """A client of the node, with another key or another way to present it."""
        make = RestWire if self.protocol == "rest" else GrpcWire
        return make(self.stage.options.node, key, dialect)

    def close(self) -> None:
        self.node.close()

    @property
    def rest(self) -> RestWire:
        assert isinstance(self.node, RestWire)
        return self.node

    @property
    def rpc(self) -> GrpcWire:
        assert isinstance(self.node, GrpcWire)
        return self.node

    # The backend

    def start(self, *users: User, **extra: Any) -> BaseInfoResponse:
        """Send a Start with the inbounds of the stage and these users."""
        reply: BaseInfoResponse = self.node.call("Start", self.stage.backend(users, **extra))
        return reply

    def stop(self) -> None:
        """Send a Stop. A node may refuse it if nothing runs."""
        try:
            self.node.call("Stop", Empty())
        except Refused as error:
            assert "backend not initialized" in error.text or "not started" in error.text, f"Stop: {error}"

    def info(self) -> BaseInfoResponse:
        reply: BaseInfoResponse = self.node.call("GetBaseInfo", Empty())
        return reply

    # Users

    def member(self, person: TestUser, *tags: str) -> User:
        """The user in these inbounds, or in all."""
        return self.stage.member(person, *(tags or self.stage.doors))

    def gone(self, person: TestUser) -> User:
        return User(email=person.email)

    def sync(self, *users: User) -> None:
        self.node.call("SyncUser", *users)

    def replace(self, *users: User) -> None:
        self.node.call("SyncUsers", Users(users=users))

    def connect(
        self, person: TestUser, tag: str = VLESS, timeout: float = 10.0, to: EchoServer | None = None
    ) -> socket.socket:
        """A connection through the node's core to an echo server. Raises `OSError` if it is refused."""
        self.need_traffic()
        return transfer.connect(self.stage.socks(person, tag), to or self.stage.echo, timeout)

    def is_in(self, person: TestUser, tag: str = VLESS, timeout: float = 10.0, to: EchoServer | None = None) -> bool:
        """Whether a new connection reaches the echo server and gets a reply.

        Without traffic: whether the node lists the user as confirmed in the inbound.
        """
        if not self.stage.options.traffic and to is None:
            return self._confirmed(person, tag)
        try:
            self.connect(person, tag, timeout, to).close()
        except OSError:
            return False
        return True

    def _confirmed(self, person: TestUser, tag: str) -> bool:
        try:
            rows = self.node.call("ListUsers", ListUsersRequest(names=[person.email])).users
        except Refused as error:
            if error.lacking:
                self.need_traffic()
            raise
        if any(row.shortened for row in rows):
            self.need_traffic()
        return any(row.name == person.email and tag in row.confirmed for row in rows)

    def need_traffic(self) -> None:
        """Raises `LeftOut` if no client connects to the core."""
        if not self.stage.options.traffic:
            raise LeftOut("the rest of it needs traffic of users")

    def comes_in(self, person: TestUser, tag: str = VLESS, to: EchoServer | None = None) -> None:
        self.soon(lambda: self.is_in(person, tag, to=to), f"a user gets in through {tag!r}")

    def stays_out(self, person: TestUser, tag: str = VLESS, to: EchoServer | None = None) -> None:
        self.soon(lambda: not self.is_in(person, tag, OUT, to), f"a user stays out of {tag!r}")

    def soon(self, condition: Any, what: str) -> Any:
        """Wait for the condition, up to the run's `patience`; an exception but `LeftOut` counts as "not yet"."""
        found = until(lambda: _unless_left_out(condition), self.stage.options.patience, what)
        if isinstance(found, LeftOut):
            raise found
        return found

    # Statistics

    def rows(self, kind: StatType, name: str = "", reset: bool = False) -> dict[tuple[str, str], int]:
        """Bytes by name and direction, without zeros."""
        reply = self.node.call("GetStats", StatRequest(type=kind, name=name, reset=reset))
        assert {row.link for row in reply.stats} <= {"traffic"}, "`link` is not `traffic`"
        found = {(row.name, row.type): row.value for row in reply.stats if row.value}
        assert {direction for _, direction in found} <= {"uplink", "downlink"}, f"`type` is neither of two: {found}"
        return found

    def counted(self, kind: StatType, name: str, reset: bool = False, of: str = "") -> Traffic:
        """The bytes of this name; of `of` if the request is for all names."""
        rows, wanted = self.rows(kind, name, reset), of or name
        return Traffic(rows.get((wanted, "uplink"), 0), rows.get((wanted, "downlink"), 0))

    def traffic(self, person: TestUser, tag: str = VLESS) -> Traffic:
        """Let the user send and receive. Returns the bytes that the destination counted."""
        echo = self.stage.echo
        up, down = echo.received, echo.sent
        with self.connect(person, tag) as link:
            transfer.upload(link, 100_000)
            transfer.download(link, 300_000)
        return Traffic(echo.received - up, echo.sent - down)


def _unless_left_out(condition: Callable[[], Any]) -> Any:
    try:
        return condition()
    except LeftOut as why:
        return why


@dataclasses.dataclass
class Traffic:
    """Bytes from a user, and to them."""

    up: int = 0
    down: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.up + other.up, self.down + other.down)
