"""A core's verdict on a configuration: what it says counts, not that it ended."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.trial.unittest import TestCase

from drivers.process.readiness import last
from drivers.sing_box.driver import SingBox
from drivers.xray.driver import Xray
from node.contract.driver import Driver, Host
from node.errors import CoreFailed, InvalidConfig
from node.logs import LogRing

reactor: Any = installed

# By the driver: its setting for the executable, what the core calls itself, and how it refuses a configuration.
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
# Ends that say nothing of the configuration: the kernel's when memory is short, Go's, and a machine's that is full.
NO_VERDICTS = {
    "signal 9": "kill -9 $$",
    "signal 15": "kill -15 $$",
    "out of memory": "echo 'fatal error: runtime: out of memory' >&2; exit 2",
    "said nothing": "exit 1",
}


class VerdictTests(TestCase):
    """The executable is a stand-in, which ends as it is told to."""

    timeout = 20

    def driver(self, kind: Any, script: str) -> Driver:
        """The driver of a core that does this with a configuration."""
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
        """A core that is killed over a configuration, or ends without a word about it, did not refuse it."""
        for kind in CORES:
            for words, script in NO_VERDICTS.items():
                with self.assertRaises(CoreFailed) as caught:
                    await self.driver(kind, script).prepare("{}", frozenset())
                self.assertIn(words, caught.exception.text)

    async def test_the_machines_fault(self) -> None:
        """What the machine could not give the core is no fault of the configuration."""
        for kind, (_, _, refusal) in CORES.items():
            script = refusal.replace("nonsense", "open geoip.dat: too many open files")
            with self.assertRaises(CoreFailed):
                await self.driver(kind, script).prepare("{}", frozenset())

    async def test_too_deep(self) -> None:
        """A configuration that a core reads, and that is nested deeper than Python reads, is refused as well."""
        deep = "[" * 3000 + "]" * 3000
        with self.assertRaises(InvalidConfig):
            await self.driver(SingBox, f"echo '{deep}'").prepare("{}", frozenset())

    async def test_a_panic(self) -> None:
        """A core that breaks over a configuration would do so again; its first line says more than the stack behind."""
        for length in (1, 200):
            stack = f"for line in $(seq {length}); do echo goroutine $line; done"
            script = f"{{ echo 'panic: index out of range'; {stack}; }} >&2; exit 2"
            for kind in CORES:
                with self.assertRaises(InvalidConfig) as caught:
                    await self.driver(kind, script).prepare("{}", frozenset())
                self.assertTrue(caught.exception.text.endswith("panic: index out of range"))

    def test_a_panic_at_the_start(self) -> None:
        """The line that says why the core broke, not the end of the stack behind it."""
        lines = ["Xray 26.3.27", "panic: index out of range", *map(str, range(100))]
        self.assertEqual(last(lines), "panic: index out of range")
        self.assertEqual(last(lines[:1]), "Xray 26.3.27")

    async def test_a_verdict(self) -> None:
        """The core's own words are the reason of a refusal."""
        for kind, (_, _, refusal) in CORES.items():
            with self.assertRaises(InvalidConfig) as caught:
                await self.driver(kind, refusal).prepare("{}", frozenset())
            self.assertIn("nonsense", caught.exception.text)
