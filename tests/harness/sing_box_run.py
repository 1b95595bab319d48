"""A run of sing-box without a node, and users who connect from several addresses."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from drivers.sing_box.driver import SingBox
from drivers.sing_box.generation import SingBoxGeneration
from node.backend.roster import Roster
from node.base.logs import LogRing
from node.contract.driver import Host
from protos.service_pb2 import User
from scripts.staging import transfer
from scripts.staging.core import Json
from scripts.staging.echo import EchoServer
from scripts.staging.node import LOCAL_TARGETS
from scripts.staging.ports import free_port
from scripts.staging.sing_box import Door, SingBoxClient, config, find_sing_box
from scripts.staging.users import TestUser

reactor: Any = installed

T = TypeVar("T")


def both(person: TestUser, *doors: Door) -> User:
    """The user as a controller sends them for several inbounds."""
    message = User(email=person.email)
    for door in doors:
        message.MergeFrom(User(inbounds=door.tags, proxies=door.user(person).proxies))
    return message


@contextmanager
def devices(*routes: tuple[Door, TestUser, str]) -> Iterator[list[int]]:
    """Run a client for these users, each with an inbound and a source address. Yields their SOCKS ports."""
    ports = {free_port(): _from(door.outbounds(person), source) for door, person, source in routes}
    with SingBoxClient(ports):
        yield list(ports)


def _from(chain: list[Json], source: str) -> list[Json]:
    """Set the source address in the chain's last outbound, which opens the connection."""
    return [*chain[:-1], {**chain[-1], "inet4_bind_address": source}]


class SingBoxRun(TestCase):
    """Tests with a run of one build; traffic runs in threads."""

    build = "built"

    async def setUp(self) -> None:  # type: ignore[override]
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.directory = directory = Path(temporary.name)
        settings = {"CORE_PATHS": temporary.name, **LOCAL_TARGETS}
        settings["SING_BOX_EXECUTABLE_PATH"] = str(find_sing_box(self.build))
        self.driver = SingBox(Host(reactor, LogRing(reactor, 1000), directory, settings))
        self.echo = EchoServer()
        self.echo.__enter__()
        self.addCleanup(deferToThread, self.echo.__exit__, None, None, None)

    async def launched(self, doors: Iterable[Door], users: Iterable[User], **extra: object) -> SingBoxGeneration:
        inbounds = [one for door in doors for one in door.inbounds]
        plan = await self.driver.prepare(config(inbounds, **extra), frozenset())
        roster, refused = Roster.of(list(users), plan.tags, plan.account)
        assert not refused
        core = await plan.launch(roster.target, 8)
        self.addCleanup(lambda: Deferred.fromCoroutine(core.stop()))
        return core

    async def clients(self, *routes: tuple[Door, TestUser, str]) -> list[int]:
        """Run `devices` until the end of the test."""
        running = devices(*routes)
        ports = await deferToThread(running.__enter__)
        self.addCleanup(deferToThread, running.__exit__, None, None, None)
        return ports

    async def connected(self, port: int) -> socket.socket:
        """A connection to the echo server through this port, open until the end of the test."""
        link = await deferToThread(transfer.connect, port, self.echo)
        self.addCleanup(link.close)
        return link

    async def until(self, condition: Callable[[], Awaitable[T]], seconds: float = 10.0) -> T:
        """Wait for the first true result. Raises `AssertionError` with the last one at the timeout."""
        deadline = reactor.seconds() + seconds
        while not (answer := await condition()):
            assert reactor.seconds() < deadline, answer
            await deferLater(reactor, 0.02)
        return answer
