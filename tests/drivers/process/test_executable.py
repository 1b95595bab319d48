"""Running a core's executable for its version or a check: cached answers, errors, and the node's end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from drivers.install.releases import XRAY
from drivers.process.executable import Installation
from node.base.errors import CoreFailed
from node.base.logs import LogRing
from node.contract.driver import Done, Host
from protos.handover_pb2 import Common
from scripts.staging.process import tied
from scripts.staging.sing_box import BUILDS, find_sing_box
from scripts.staging.wait import until

reactor: Any = installed

ROOT = Path(__file__).parents[3]
# The node's part: each line of arguments is a kind of core, its executable and a configuration to check.
PARENT = """
import json, pathlib, sys
from twisted.internet import reactor
from twisted.internet.defer import ensureDeferred
from drivers.registry import REGISTRY
from node.contract.driver import Host
from node.base.logs import LogRing
from protos.service_pb2 import BackendType

for name, executable, text in json.load(sys.stdin):
    settings = {f"{name}_EXECUTABLE_PATH": executable}
    host = Host(reactor, LogRing(reactor, 10), pathlib.Path(sys.argv[1]), settings)
    driver = REGISTRY[BackendType.Value(name)].load(host)
    reactor.callWhenRunning(lambda driver=driver, text=text: ensureDeferred(driver.prepare(text, frozenset())))
reactor.run()
"""


def stand_in(path: Path, *answers: str) -> str:
    """An executable that prints these versions, one per call, and hangs otherwise."""
    path.write_text(f'#!/bin/sh\n[ "$1" = version ] && {" && ".join(answers)} && exit 0\nexec sleep 60\n')
    path.chmod(0o755)
    return str(path)


def endless() -> str:
    """A configuration that sing-box parses for hours: each level doubles the time."""
    rule: dict[str, Any] = {"domain": ["a"]}
    for _ in range(300):
        rule = {"type": "logical", "mode": "and", "rules": [rule]}
    return json.dumps({"route": {"rules": [{**rule, "outbound": "x"}]}})


class VersionTests(TestCase):
    """The output of `version`."""

    timeout = 20

    async def test_warnings_beside_the_version(self) -> None:
        """The version is found among warnings of the executable or the leash."""
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        directory = Path(temporary.name)
        path = directory / "xray"
        path.write_text("#!/bin/sh\necho a warning >&2\necho Xray 26.3.27 and more\n")
        path.chmod(0o755)
        settings = {"XRAY_EXECUTABLE_PATH": str(path)}
        found = await Installation(Host(reactor, LogRing(reactor, 10), directory, settings), XRAY).current(None)
        self.assertEqual((found.version, found.number), ("26.3.27", (26, 3, 27)))


class HandedOnTests(TestCase):
    """Answers that an executable gave to a previous node process."""

    timeout = 20

    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.directory = Path(temporary.name)
        self.asked = 0
        self.settings = {"XRAY_EXECUTABLE_PATH": stand_in(self.directory / "core", "echo Xray 26.3.27 and more")}

    def installation(self, oldest: tuple[int, ...] = ()) -> Installation:
        host = Host(reactor, LogRing(reactor, 10), self.directory, self.settings)
        return Installation(host, XRAY, oldest=oldest)

    async def answer(self, of: Installation, text: bytes) -> bytes:
        async def look() -> Done:
            self.asked += 1
            return Done(0, (), b"%d %s" % (self.asked, text))

        return await of.answered(await of.current(None), "convert", text, look)

    async def handed_on(self) -> Common:
        old = self.installation()
        await self.answer(old, b"before")
        old.keep(True)
        await self.answer(old, b"text")
        found = Common.FromString(old.packed.SerializeToString())
        old.keep(False)
        self.assertEqual(old.packed.answers, [])
        return found

    async def test_nothing_is_asked_again(self) -> None:
        """Answers that were kept serve until the new process has taken over; then it asks itself."""
        new = self.installation()
        new.go_on(await self.handed_on())
        (self.directory / "core").write_text("#!/bin/sh\nexit 1\n")
        os.utime(self.directory / "core", ns=(0, new.packed.installed[0].changed))
        self.assertEqual((await new.version(), (await new.current(None)).number), ("26.3.27", (26, 3, 27)))
        self.assertEqual([await self.answer(new, text) for text in (b"text", b"before")], [b"2 text", b"3 before"])
        new.look_again()
        self.settings["XRAY_EXECUTABLE_PATH"] = stand_in(self.directory / "other", "echo Xray 27.1.1 and more")
        self.assertEqual(await new.version(), "27.1.1")
        self.assertEqual(await self.answer(new, b"text"), b"4 text")

    async def test_another_file(self) -> None:
        """A changed file is asked again."""
        new = self.installation()
        new.go_on(await self.handed_on())
        stand_in(self.directory / "core", "echo Xray 27.1.1 and more")
        os.utime(self.directory / "core", ns=(0, 1))
        self.assertEqual(await new.version(), "27.1.1")
        self.assertEqual(await self.answer(new, b"text"), b"3 text")

    async def test_another_setting(self) -> None:
        """The executable that it names is used."""
        common = await self.handed_on()
        self.settings = {"XRAY_EXECUTABLE_PATH": stand_in(self.directory / "other", "echo Xray 27.1.1 and more")}
        new = self.installation()
        new.go_on(common)
        self.assertEqual(await new.version(), "27.1.1")

    async def test_one_that_is_too_old(self) -> None:
        """A node version that needs a newer one reports that."""
        new = self.installation(oldest=(27,))
        new.go_on(await self.handed_on())
        await self.assertFailure(Deferred.fromCoroutine(new.version()), CoreFailed)


@pytest.mark.core
def test_no_command_outlives_a_killed_node(tmp_path: Path) -> None:
    """After kill -9 during `version`, a conversion and a check, all three processes end."""
    real = str(find_sing_box(next(iter(BUILDS))))
    looks = [
        ("XRAY", stand_in(tmp_path / "mute", "false"), ""),
        ("XRAY", stand_in(tmp_path / "xray", "echo Xray 26.3.27"), ""),
        ("SING_BOX", stand_in(tmp_path / "sing-box", "echo sing-box version 1.14.1"), ""),
        ("SING_BOX", real, endless()),
    ]
    with tied([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE) as parent:
        assert parent.stdin
        parent.stdin.write(json.dumps(looks).encode())
        parent.stdin.close()
        try:
            until(lambda: len(looking(parent.pid)) == len(looks), 20, "all of them look")
            under_way = looking(parent.pid)
        finally:
            parent.kill()
        try:
            until(lambda: not any(map(runs, under_way)), 5, "all of them end")
        finally:
            for process in filter(runs, under_way):
                process.kill()


def looking(pid: int) -> list[psutil.Process]:
    """The children of a node that do not end soon on their own."""

    def hangs(process: psutil.Process) -> bool:
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            return False
        return command[0] == "sleep" or command[1:2] == ["format"]

    return list(filter(hangs, psutil.Process(pid).children()))


def runs(process: psutil.Process) -> bool:
    """Whether the process runs, and is not a zombie that its new parent has not reaped."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
