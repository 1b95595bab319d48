"""The parts of metrics and health checks: names, sharing, verdicts, delay of the event loop."""

from __future__ import annotations

import base64
import json
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.api.auth import bearer_of
from node.backend.state import State, Status
from node.base.errors import CoreFailed
from node.base.logs import LogRing
from node.contract.generations import Generations
from node.door.ports import is_loopback, is_open_to_others
from node.machine.peer_user import user_of
from node.machine.usage import most_files, open_files, usage
from node.metrics import lag
from node.metrics.families import FAMILIES, READ, Kind, made
from node.metrics.pages import FRESH, Shared, _verdict
from node.metrics.readiness import Readiness, checks
from tests.harness.figures import series

ODD = 'a"b\\c\nd é'


class _Told:
    def collect(self) -> Any:
        labels = {family.name: [([ODD] * len(family.labels), 7.0)] for family in READ}
        yield from made(READ, labels)


@pytest.mark.parametrize("write", [generate_latest, openmetrics])
def test_every_metric_is_written_as_in_the_table(write: Callable[[Any], bytes]) -> None:
    """With its labels, whatever characters are in them, in both forms."""
    found = series(write(_Told()).decode())
    assert {name for name, _ in found} == {family.name for family in READ}
    for (name, labels), number in found.items():
        assert number == (1 if name.endswith("_info") else 7)
        assert all(text == ODD for _, text in labels)


def test_names_follow_the_rules_of_prometheus() -> None:
    """One prefix, `_total` for counters only, and a text for each."""
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.name.startswith("txnode_")
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
        assert family.text


class SharedTests(SynchronousTestCase):
    """Work is done once for all callers that wait."""

    def setUp(self) -> None:
        self.clock: Any = Clock()
        self.works: list[Deferred[int]] = []

        async def work() -> int:
            self.works.append(Deferred())
            return await self.works[-1]

        self.shared = Shared(self.clock, work)

    def ask(self) -> Deferred[int]:
        return ensureDeferred(self.shared.get())

    def test_two_at_once(self) -> None:
        """Also if one of them gives up; a caller soon after gets the same result, a later one a new one."""
        one, other = self.ask(), self.ask()
        one.cancel()
        self.failureResultOf(one)
        self.works[0].callback(1)
        self.assertEqual(self.successResultOf(other), 1)
        self.assertEqual(self.successResultOf(self.ask()), 1)
        self.clock.advance(FRESH)
        later = self.ask()
        self.works[1].callback(2)
        self.assertEqual(self.successResultOf(later), 2)

    def test_all_callers_get_an_error_and_it_is_not_cached(self) -> None:
        one, other = self.ask(), self.ask()
        self.works[0].errback(ZeroDivisionError())
        self.failureResultOf(one, ZeroDivisionError)
        self.failureResultOf(other, ZeroDivisionError)
        again = self.ask()
        self.works[1].callback(3)
        self.assertEqual(self.successResultOf(again), 3)


class ReadinessTests(SynchronousTestCase):
    """Checks are made every second; each change is reported once."""

    def setUp(self) -> None:
        self.clock: Any = Clock()
        self.fault, self.told = "", list[bool]()

        async def state() -> str:
            if self.fault == "raise":
                raise ZeroDivisionError
            if self.fault == "fail":
                raise CoreFailed("it fails")
            return self.fault

        self.readiness = Readiness(self.clock, {"state": state}, self.told.append)
        self.readiness.begin()
        self.addCleanup(self.readiness.stop)

    def after(self, fault: str) -> str:
        self.fault = fault
        self.clock.advance(1)
        return self.readiness.faults.get("state", "")

    def test_a_verdict(self) -> None:
        """The first verdict is there at once."""
        self.assertTrue(self.readiness.ready)
        self.assertEqual(self.after(""), "")
        self.assertEqual(self.after("the disk is full"), "the disk is full")
        self.assertEqual(self.after("fail"), "it fails")
        self.assertEqual(self.after(""), "")
        self.assertEqual(self.told, [True, False, True])

    def test_a_check_that_raises_has_failed(self) -> None:
        self.after("")
        self.assertIn("ZeroDivisionError", self.after("raise"))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class _Run:
    alive = True
    closed: tuple[str, ...] = ()

    async def deaf(self) -> tuple[str, ...]:
        return self.closed


class CheckTests(SynchronousTestCase):
    """The three checks."""

    def setUp(self) -> None:
        clock: Any = Clock()
        journal: Any = type("Journal", (), {"tell": lambda *_, **__: None})()
        self.store: Any = type("Store", (), {"fault": ""})()
        self.status = Status(LogRing(clock, 10), journal)
        self.generations = Generations()
        self.core: Any = _Run()

    def verdict(self) -> dict[str, str]:
        found = checks(self.store, self.status, self.generations)
        told = {name: self.successResultOf(ensureDeferred(check())) for name, check in found.items()}
        return {name: text for name, text in told.items() if text}

    def test_without_a_backend(self) -> None:
        self.assertEqual(self.verdict(), {})
        self.store.fault = "no room"
        self.assertEqual(self.verdict(), {"state": "no room"})

    def test_with_a_backend(self) -> None:
        """It has to run; while another core comes up it may be the old one."""
        self.status.enter(State.STARTING, "soon")
        self.assertEqual(self.verdict(), {"core": "the core is starting: soon"})
        self.generations.adopt(self.core)
        self.assertEqual(self.verdict(), {})
        self.status.enter(State.RUNNING)
        self.assertEqual(self.verdict(), {})
        self.core.closed = ("port 1", "port 2")
        self.assertEqual(self.verdict(), {"inbounds": "port 1; port 2"})
        self.core.closed, self.core.alive = (), False
        self.assertIn("core", self.verdict())
        self.status.enter(State.FAILED, "bad")
        self.assertEqual(self.verdict(), {"core": "the core is failed: bad"})
        self.status.enter(State.STOPPED)
        self.assertEqual(self.verdict(), {})


class LagTests(SynchronousTestCase):
    def test_the_longest_delay_of_a_minute(self) -> None:
        clock: Any = Clock()
        looked = lag.Lag(clock)
        looked.start()
        clock.advance(lag.INTERVAL)
        self.assertEqual(looked.worst, 0)
        clock.advance(lag.INTERVAL + 2)
        self.assertEqual(looked.worst, 2)
        clock.pump([lag.INTERVAL] * int(lag.REMEMBERED / lag.INTERVAL))
        self.assertEqual(looked.worst, 0)
        looked.stop()
        self.assertEqual(clock.getDelayedCalls(), [])


@pytest.mark.parametrize("faults", [{}, {"core": "the core of ann is down"}])
def test_a_stranger_gets_only_the_verdict(faults: dict[str, str]) -> None:
    """In either form; with a key the reply has the reasons."""
    status, word = (503, "not ok") if faults else (200, "ok")
    text = _verdict(faults, ("state", "core"), "", known=False)
    assert (text.status, text.body) == (status, f"{word}\n".encode())
    assert json.loads(_verdict(faults, ("state", "core"), "application/json", known=False).body) == {"ok": not faults}
    told = json.loads(_verdict(faults, ("state", "core"), "application/json", known=True).body)
    assert told == {"ok": not faults, "checks": {"state": "ok", "core": faults.get("core", "ok")}}
    assert all(fault in _verdict(faults, (), "", known=True).body.decode() for fault in faults.values())


def test_the_password_is_the_key() -> None:
    """A header that is not basic authentication stays as it is."""
    for key in ("key", "a:b", ""):
        assert bearer_of("bAsic " + base64.b64encode(f"who:{key}".encode()).decode()) == f"Bearer {key}"
    for other in ("Bearer x", "Basic %%%", "Basic é", "Basic \udce9", "Basic", ""):
        assert bearer_of(other) == other
    assert bearer_of("Basic " + base64.b64encode(b"no colon").decode()) == "Bearer "


def test_without_a_descriptor() -> None:
    """Without a free descriptor nothing can be looked up; the other metrics are reported all the same."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert usage() is None
        assert open_files() == most_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_user_of_a_connection() -> None:
    """The kernel knows that it is ours, and nothing of a connection that does not exist."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        taken, peer = server.accept()
        with taken:
            assert user_of(peer, taken.getsockname()) == os.getuid()
            assert user_of(("127.0.0.1", 1), taken.getsockname()) is None
            transport: Any = type("Transport", (), {})()
            transport.getPeer = lambda: type("Address", (), {"host": peer[0], "port": peer[1]})
            transport.getHost = lambda: type("Address", (), {"host": "127.0.0.1", "port": server.getsockname()[1]})
            assert not is_open_to_others(None, transport)
            # No process has the socket any more, and older kernels report root: it may have been a core's.
            client.close()
            assert user_of(peer, taken.getsockname()) is None
            assert not is_open_to_others(None, transport)


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True)),
        *(("::ffff:10.0.0.1", False), ("10.0.0.1", False), ("fe80::1%eth0", False), ("192.0.2.1", False)),
    ],
)
def test_loopback(host: str, is_here: bool) -> None:
    assert is_loopback(host) == is_here
