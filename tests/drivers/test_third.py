"""A third core, made of a small script: all that a driver must bring, and that a backend runs on it."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from drivers.process.child import CoreProcess
from drivers.process.executable import ENVIRONMENT
from drivers.process.orphans import sweep
from drivers.process.spawn import Spawner, in_memory
from drivers.process.starting import last, ready
from node.base.errors import InvalidConfig
from node.base.logs import LogRing
from node.contract.accounts import Account, Accounts, Change
from node.contract.counters import Reading, Scope, Seen, counter_name
from node.contract.driver import Applied, Driver, Exit, Generation, Host, Plan
from node.contract.generations import Generations
from protos.service_pb2 import Backend, BackendStatsResponse, User
from tests.harness.memory import MemoryRecord, person
from tests.harness.whole import make_runner

reactor: Any = installed

# A core: it reads its users, says whom it serves, and goes on until it is ended.
SCRIPT = "import json, signal, sys; print('serving', *json.load(sys.stdin), flush=True); signal.pause()"


class ScriptDriver:
    """A configuration is the tag of the only inbound."""

    name = "script"

    def __init__(self, host: Host) -> None:
        self._host = host

    def fingerprint(self, config_text: str) -> str:
        return config_text.strip()

    async def version(self) -> str:
        return "1"

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> ScriptPlan:
        if not config_text.strip().isalpha():
            raise InvalidConfig("a configuration is one word")
        return ScriptPlan(self._host, config_text.strip())


class ScriptPlan:
    warnings = notes = ()

    def __init__(self, host: Host, tag: str) -> None:
        self._host, self.tags = host, (tag,)

    def account(self, tag: str, user: User) -> Account | None:
        password = user.proxies.trojan.password.encode()
        return Account(password, password)

    def same_credential(self, one: bytes, other: bytes) -> bool:
        return one == other

    def alike(self, other: Plan) -> bool:
        return self.tags == other.tags

    async def check(self, target: Mapping[str, Accounts]) -> None:
        if any(b"bad" in accounts.values() for accounts in target.values()):
            raise InvalidConfig("the script takes no bad passwords")

    async def launch(self, target: Mapping[str, Accounts], seconds: float) -> ScriptRun:
        core = CoreProcess(self._host.reactor, self._host.log.extend)
        spawner = Spawner(self._host.reactor, self._host.directory, ENVIRONMENT)
        run = ScriptRun(core, target)
        with ExitStack() as files:
            names = json.dumps([*run.accounts[self.tags[0]]]).encode()
            spawner.spawn(core, [sys.executable, "-c", SCRIPT], {0: in_memory(names, files)})
        await ready(self._host.reactor, core, lambda: run.answers(1), seconds, lambda _: False, last)
        return run


class ScriptRun:
    warnings = ()
    uncounted = frozenset({Scope.USER})
    outdated = lingering = False
    cut = 0

    def __init__(self, process: CoreProcess, accounts: Mapping[str, Accounts]) -> None:
        self._process = process
        self.accounts = {tag: dict(users) for tag, users in accounts.items()}

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.exit is None

    def when_exited(self) -> Deferred[Exit]:
        return self._process.when_exited()

    async def apply(self, changes: Sequence[Change]) -> Applied:
        """It reads its users once: every change takes another run."""
        return Applied([], list(changes))

    async def audit(self) -> int:
        return 0

    async def counters(self, _: Seen | None = None) -> Reading:
        return {counter_name(Scope.INBOUND, tag, "uplink"): 0 for tag in self.accounts}

    async def online(self, key: str) -> Mapping[str, int]:
        return {}

    async def backend_stats(self) -> BackendStatsResponse:
        return BackendStatsResponse()

    async def answers(self, seconds: float) -> bool:
        return self.alive and bool(self._process.last_lines)

    async def wind_down(self) -> None:
        """It has no connections."""

    async def stop(self) -> None:
        await self._process.stop()

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)


async def read(_: Generation) -> bool:
    """It counts nothing that could move."""
    return False


class ThirdDriverTests(TestCase):
    async def setUp(self) -> None:  # type: ignore[override]
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.ring, self.generations = LogRing(reactor, 100), Generations()
        self.directory = Path(temporary.name)
        host = Host(reactor, self.ring, self.directory, {})
        self.driver: Driver = ScriptDriver(host)
        self.runner = make_runner(reactor, self.ring, MemoryRecord(), self.generations, read)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.runner.close()))

    async def start(self, config: str, *users: User) -> None:
        await self.runner.start(self.driver, Backend(config=config, users=users))

    def served(self) -> set[str]:
        """Whom the newest run has said that it serves."""
        return set(next(line for line in reversed(self.ring.read(0)[0]) if line.startswith("serving")).split()[1:])

    async def test_users(self) -> None:
        """They come and go by another run, and a crash brings them back."""
        await self.start("home", person("ann", "one", "home"))
        self.assertEqual(self.served(), {"ann"})
        await self.runner.users.update([person("bob", "two", "home"), person("ann")])
        self.assertEqual(self.served(), {"bob"})
        first = self.runner.current()
        first.kill()
        await first.when_exited()
        while not self.runner.status.running:
            await deferLater(reactor, 0.01)
        self.assertIsNot(self.runner.current(), first)
        self.assertEqual(self.served(), {"bob"})

    async def test_what_is_refused(self) -> None:
        """A configuration that the core does not take changes nothing, and neither does a user."""
        await self.start("home", person("ann", "one", "home"))
        first = self.runner.current()
        with self.assertRaises(InvalidConfig):
            await self.start("no home")
        await self.start("home", person("ann", "one", "home"), person("eve", "bad", "home"))
        self.assertIs(self.runner.current(), first)
        self.assertIn("user 'eve' is left out", "\n".join(self.ring.read(0)[0]))

    async def test_no_core_is_left(self) -> None:
        await self.start("home")
        run = self.runner.current()
        await self.runner.stop("asked")
        self.assertFalse(run.alive)
        self.assertEqual((self.generations.counting, sweep(self.directory)), ((), []))
