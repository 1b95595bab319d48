"""The floor: the time that the core alone takes for the same work, without the node."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from drivers.xray import config
from drivers.xray.api import HANDLER, STATS
from node.backend.roster import Roster
from protos import xray_pb2
from protos.service_pb2 import User
from scripts.bench.stage import timed
from scripts.staging.core import ENVIRONMENT, find_xray

IN_FLIGHT = 64
_ADD = "xray.app.proxyman.command.AddUserOperation"
_REMOVE = "xray.app.proxyman.command.RemoveUserOperation"
ALTER = HANDLER + "AlterInbound"


def convert(text: str, output: Path) -> None:
    argv = [str(find_xray()), "convert", "pb", "-outpbfile", str(output), "stdin:"]
    subprocess.run(argv, input=text.encode(), check=True, capture_output=True)


class BareCore:
    """A core with these users, run without a node. `started` is the seconds until its API replied."""

    def __init__(self, text: str, users: Iterable[User], directory: Path) -> None:
        name = directory / secrets.token_hex(4)
        self.converted = timed(lambda: convert(text, name))
        plan = config.plan(name.read_bytes(), text, frozenset())
        roster, _ = Roster.of(users, plan.tags, plan.account)
        self.socket = name.with_suffix(".sock")
        self._message = config.render(plan, config.ApiAddress(str(self.socket), name.name, False), roster.target)
        self._plan = plan

    def calls(self, users: Iterable[User], *, remove: bool = True) -> list[list[bytes]]:
        """AlterInbound requests for each user and inbound: remove the old account (if `remove`), add the new one."""
        return [
            ([_removal(tag, user.email)] if remove else []) + [_addition(tag, self._packed(tag, user))]
            for user in users
            for tag in self._plan.tags
        ]

    def removals(self, users: Iterable[User]) -> list[list[bytes]]:
        """AlterInbound requests that remove each user from each inbound."""
        return [[_removal(tag, user.email)] for user in users for tag in self._plan.tags]

    def inbound(self, tag: str, users: Iterable[User]) -> bytes:
        """The request that adds an inbound with these users."""
        accounts = {user.email: self._packed(tag, user) for user in users}
        return xray_pb2.AddInboundRequest(inbound=self._plan.handler(tag, accounts)).SerializeToString()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        self.started = timed(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def _packed(self, tag: str, user: User) -> bytes:
        account = self._plan.account(tag, user)
        assert account is not None
        return account.packed

    def _start(self) -> None:
        argv = [str(find_xray()), "run", "-format", "protobuf", "-c", "stdin:"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=dict(ENVIRONMENT))
        assert self._process.stdin is not None
        self._process.stdin.write(self._message)
        self._process.stdin.close()
        while not _connects(self.socket):
            assert self._process.poll() is None, f"the core ended with {self._process.returncode}"
            time.sleep(0.002)
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            channel.unary_unary(STATS + "GetSysStats")(b"", wait_for_ready=True, timeout=10)


def alter(path: Path, calls: Sequence[Sequence[bytes]]) -> float:
    """Seconds for all calls, those of one row in order, `IN_FLIGHT` rows at a time."""

    async def run() -> float:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            call, rest = channel.unary_unary(ALTER), iter(calls)

            async def work() -> None:
                for row in rest:
                    for request in row:
                        await call(request)

            begun = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
            return time.perf_counter() - begun

    return asyncio.run(run())


class Effects:
    """Polls the core's API until the change of a user of an inbound is in effect. For use with asyncio."""

    def __init__(self, address: str, tag: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._list = self._channel.unary_unary(HANDLER + "GetInboundUsers")
        self.alter = self._channel.unary_unary(ALTER)
        self._tag = tag

    async def done(self, user: User) -> None:
        """Wait until the core has the user with this id, or (for a user without proxies) has removed them."""
        await (self.seen(user) if user.HasField("proxies") else self.unseen(user))

    async def seen(self, user: User) -> None:
        """Wait until the core has the user with this id."""
        identity = user.proxies.vless.id.encode()
        await self._until(user.email, lambda reply: identity in reply)

    async def unseen(self, user: User) -> None:
        """Wait until the core no longer has the user."""
        await self._until(user.email, lambda reply: user.email.encode() not in reply)

    async def _until(self, email: str, holds: Callable[[bytes], bool]) -> None:
        request = xray_pb2.GetInboundUserRequest(tag=self._tag, email=email).SerializeToString()
        deadline = time.monotonic() + 10
        while not holds(await self._list(request)):
            assert time.monotonic() < deadline, f"the change of {email} took no effect within 10 s"

    async def close(self) -> None:
        await self._channel.close()


def effects(path: Path, tag: str, users: Sequence[User], calls: Sequence[Sequence[bytes]]) -> list[float]:
    """Seconds from the first call for each user until the core reports the change, one user after the other.

    A user without proxies is a removal.
    """

    async def run() -> list[float]:
        watch = Effects(f"unix:{path}", tag)
        found = []
        for user, row in zip(users, calls, strict=True):
            begun = time.perf_counter()
            for request in row:
                await watch.alter(request)
            await watch.done(user)
            found.append(time.perf_counter() - begun)
        await watch.close()
        return found

    return asyncio.run(run())


def starts(text: str, users: Sequence[User], directory: Path, rounds: int) -> tuple[float, float]:
    """Medians in seconds: conversion of the configuration, and the start until the API replies."""
    rows = []
    for _ in range(rounds):
        with BareCore(text, users, directory) as core:
            rows.append((core.converted, core.started))
    converted, started = zip(*rows, strict=True)
    return statistics.median(converted), statistics.median(started)


def _removal(tag: str, email: str) -> bytes:
    return _operation(tag, _REMOVE, xray_pb2.RemoveUserOperation(email=email).SerializeToString())


def _addition(tag: str, packed: bytes) -> bytes:
    operation = xray_pb2.AddUserOperation(user=xray_pb2.User.FromString(packed))
    return _operation(tag, _ADD, operation.SerializeToString())


def _operation(tag: str, kind: str, value: bytes) -> bytes:
    typed = xray_pb2.TypedMessage(type=kind, value=value)
    return xray_pb2.AlterInboundRequest(tag=tag, operation=typed).SerializeToString()


def _connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(os.fspath(path)) == 0
