"""A core's verdict on a configuration: its output counts, not that it exited."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from drivers.process.child import CoreProcess
from drivers.process.starting import last, ready
from drivers.sing_box.driver import SingBox
from drivers.xray.driver import Xray
from node.base.errors import CoreFailed, InvalidConfig, PortTaken
from node.base.logs import LogRing
from node.contract.driver import Driver, Host
from tests.drivers.process.test_child import Spawning, python

reactor: Any = installed

# By driver: its setting for the executable, the banner of the core, and how it refuses a configuration.
CORES: dict[Any, tuple[str, str, str]] = {
    Xray: (
        "XRAY_EXECUTABLE_PATH",
        "Xray 26.3.27 (a stand-in)",
        "echo 'failed to load config: infra/conf: unknown protocol: nonsense' >&2; exit 1",
    ),
    SingBox: (
        "SING_BOX_EXECUTABLE_PATH",
        "sing-box version 1.14.1",
        "echo 'FATAL[0000] decode config at stdin: unknown inbound type: nonsense' >&2; exit 1",
    ),
}
# Exits without a verdict: by the kernel for want of memory, by Go, and on a full machine.
NO_VERDICTS = {
    "signal 9": "kill -9 $$",
    "signal 15": "kill -15 $$",
    "out of memory": "echo 'fatal error: runtime: out of memory' >&2; exit 2",
    "printed nothing": "exit 1",
}


class VerdictTests(TestCase):
    """The executable is a stand-in that exits as instructed."""

    timeout = 20

    def driver(self, kind: Any, script: str) -> Driver:
        """Return the driver of a core that runs this script on a configuration."""
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        setting, name, _ = CORES[kind]
        core = Path(temporary.name) / "core"
        core.write_text(f"#!/bin/sh\n[ \"$1\" = version ] && echo '{name}' && exit 0\n{script}\n")
        core.chmod(0o755)
        host = Host(reactor, LogRing(reactor, 10), Path(temporary.name), {setting: str(core)})
        made: Driver = kind(host)
        return made

    async def test_no_verdict(self) -> None:
        """A core that is killed during a check, or exits without a word about it, did not refuse it."""
        for kind in CORES:
            for words, script in NO_VERDICTS.items():
                with self.assertRaises(CoreFailed) as caught:
                    await self.driver(kind, script).prepare("{}", frozenset())
                self.assertIn(words, caught.exception.text)

    async def test_the_machines_fault(self) -> None:
        """A lack of resources of the machine is not a fault of the configuration."""
        for kind, (_, _, refusal) in CORES.items():
            script = refusal.replace("nonsense", "open geoip.dat: too many open files")
            with self.assertRaises(CoreFailed):
                await self.driver(kind, script).prepare("{}", frozenset())

    async def test_too_deep(self) -> None:
        """A configuration that is nested too deeply for Python is refused, even if the core could parse it."""
        deep = "[" * 3000 + "]" * 3000
        with self.assertRaises(InvalidConfig):
            await self.driver(SingBox, f"echo '{deep}'").prepare("{}", frozenset())

    async def test_a_panic(self) -> None:
        """A core that crashes on a configuration would do so again; the error has its panic line, not the stack."""
        for length in (1, 200):
            stack = f"for line in $(seq {length}); do echo goroutine $line; done"
            script = f"{{ echo 'panic: index out of range'; {stack}; }} >&2; exit 2"
            for kind in CORES:
                with self.assertRaises(InvalidConfig) as caught:
                    await self.driver(kind, script).prepare("{}", frozenset())
                self.assertTrue(caught.exception.text.endswith("panic: index out of range"))

    def test_a_panic_at_the_start(self) -> None:
        """The error has the panic line, not the end of the stack."""
        lines = ["Xray 26.3.27", "panic: index out of range", *map(str, range(100))]
        self.assertEqual(last(lines), "panic: index out of range")
        self.assertEqual(last(lines[:1]), "Xray 26.3.27")

    async def test_a_verdict(self) -> None:
        """The error has the core's own words."""
        for kind, (_, _, refusal) in CORES.items():
            with self.assertRaises(InvalidConfig) as caught:
                await self.driver(kind, refusal).prepare("{}", frozenset())
            self.assertIn("nonsense", caught.exception.text)


IGNORES_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print({!r}); time.sleep(60)"
ACCESS = "2026/11/21 02:17:57.788507 from 203.0.113.7:4711 accepted tcp:a.test:443 [home >> direct] email: anna@test"
INFO = "INFO [12 0ms] inbound/vless[home]: [anna@test] inbound connection to a.test:443"


class ReadyTests(Spawning):
    """A core that never answers. Its clock stands still: it would never be killed after a TERM."""

    def never(self, core: CoreProcess, cause: Any, seconds: float = 60) -> Deferred[None]:
        """Wait until the core answers."""

        async def answers() -> bool:
            return False

        self.patch(core._kill, "_reactor", Clock())
        return ensureDeferred(ready(reactor, core, answers, seconds, lambda _: False, cause))

    async def test_killed_at_once(self) -> None:
        """It is killed at its timeout, or when its caller cancels, though it ignores TERM."""
        for give_up in (False, True):
            self.lines.clear()
            core = self.start(python(IGNORES_TERM.format("up")))
            await self.says("up")
            waiting = self.never(core, Xray.cause, 60 if give_up else 0)
            if give_up:
                waiting.cancel()
            with self.assertRaises(CancelledError if give_up else CoreFailed):
                await waiting
            assert core.exit is not None
            self.assertEqual(core.exit.code, -signal.SIGKILL)

    async def test_no_error_is_about_users(self) -> None:
        """Users connect before a core answers: no error has a line about them."""
        for line in (ACCESS, INFO):
            for cause in (Xray.cause, SingBox.cause):
                self.lines.clear()
                core = self.start(python(IGNORES_TERM.format(line)))
                await self.says(line)
                with self.assertRaises(CoreFailed) as caught:
                    await self.never(core, cause, 0)
                self.assertEqual(caught.exception.text, "the core did not answer within 0 s")
                core = self.start(python(f"import os; print({line!r}); os.kill(os.getpid(), 9)"))
                with self.assertRaises(CoreFailed) as caught:
                    await self.never(core, cause)
                self.assertEqual(caught.exception.text, "the core did not start (signal 9)")

    async def test_why_it_did_not_start(self) -> None:
        """The error has the core's lines about its start."""
        for said, heard in {
            "Failed to start: no such list": "Failed to start: no such list",
            "error while loading shared libraries: libc.so": "error while loading shared libraries: libc.so",
        }.items():
            core = self.start(python(f"print({said!r}); raise SystemExit(127)"))
            with self.assertRaises(CoreFailed) as caught:
                await self.never(core, Xray.cause)
            self.assertEqual(caught.exception.text, f"the core did not start (exit code 127): {heard}")
        core = self.start(python("print('listen tcp :443: bind: address already in use'); raise SystemExit(1)"))
        with self.assertRaises(PortTaken):
            await self.never(core, Xray.cause)
