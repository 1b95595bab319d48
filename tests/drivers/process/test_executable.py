"""What runs a core's executable, if only to ask it something: it ends with the node, in time, and says no end of it."""

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
from drivers.process.spawn import Done
from node.contract.driver import Host
from node.errors import CoreFailed
from node.logs import LogRing
from protos.handover_pb2 import Common
from scripts.staging.sing_box import BUILDS, find_sing_box
from scripts.staging.wait import until

reactor: Any = installed

ROOT = Path(__file__).parents[3]
# The node's part: each line of arguments is a kind of core, its executable and a configuration for it to look at.
PARENT = """
import json, pathlib, sys
from twisted.internet import reactor
from twisted.internet.defer import ensureDeferred
from drivers.registry import REGISTRY
from node.contract.driver import Host
from node.logs import LogRing
from protos.service_pb2 import BackendType

for name, executable, text in json.load(sys.stdin):
    settings = {f"{name}_EXECUTABLE_PATH": executable}
    host = Host(reactor, LogRing(reactor, 10), pathlib.Path(sys.argv[1]), settings)
    driver = REGISTRY[BackendType.Value(name)].load(host)
    reactor.callWhenRunning(lambda driver=driver, text=text: ensureDeferred(driver.prepare(text, frozenset())))
reactor.run()
"""


def stand_in(path: Path, *answers: str) -> str:
    """An executable that says these, one for each time that it is asked for its version, and hangs otherwise."""
    path.write_text(f'#!/bin/sh\n[ "$1" = version ] && {" && ".join(answers)} && exit 0\nexec sleep 60\n')
    path.chmod(0o755)
    return str(path)


def endless() -> str:
    """A configuration that sing-box reads for hours: each level costs as much as all that is in it, twice."""
    rule: dict[str, Any] = {"domain": ["a"]}
    for _ in range(300):
        rule = {"type": "logical", "mode": "and", "rules": [rule]}
    return json.dumps({"route": {"rules": [{**rule, "outbound": "x"}]}})


class VersionTests(TestCase):
    """What an executable says of itself."""

    timeout = 20

    async def test_words_beside_the_version(self) -> None:
        """The version is found whatever the executable, or the leash before it, complains about."""
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
    """What an executable has answered to an earlier program of the node."""

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
        """Of what was asked for the next one, until that has taken over: then it looks for itself."""
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
        """It is asked, whatever the one before it said."""
        new = self.installation()
        new.go_on(await self.handed_on())
        stand_in(self.directory / "core", "echo Xray 27.1.1 and more")
        os.utime(self.directory / "core", ns=(0, 1))
        self.assertEqual(await new.version(), "27.1.1")
        self.assertEqual(await self.answer(new, b"text"), b"3 text")

    async def test_another_word_of_the_operators(self) -> None:
        """What that names is looked for."""
        common = await self.handed_on()
        self.settings = {"XRAY_EXECUTABLE_PATH": stand_in(self.directory / "other", "echo Xray 27.1.1 and more")}
        new = self.installation()
        new.go_on(common)
        self.assertEqual(await new.version(), "27.1.1")

    async def test_one_that_is_too_old(self) -> None:
        """A version of the node that needs a newer one says so."""
        new = self.installation(oldest=(27,))
        new.go_on(await self.handed_on())
        await self.assertFailure(Deferred.fromCoroutine(new.version()), CoreFailed)


@pytest.mark.core
def test_no_look_outlives_a_killed_node(tmp_path: Path) -> None:
    """After kill -9 in the middle of a question for the version, of a conversion and of a check, all of them end."""
    real = str(find_sing_box(next(iter(BUILDS))))
    looks = [
        ("XRAY", stand_in(tmp_path / "mute", "false"), ""),
        ("XRAY", stand_in(tmp_path / "xray", "echo Xray 26.3.27"), ""),
        ("SING_BOX", stand_in(tmp_path / "sing-box", "echo sing-box version 1.14.1"), ""),
        ("SING_BOX", real, endless()),
    ]
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE) as parent:
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
    """The children of a node that will not end by themselves soon."""

    def hangs(process: psutil.Process) -> bool:
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            return False
        return command[0] == "sleep" or command[1:2] == ["format"]

    return list(filter(hangs, psutil.Process(pid).children()))


def runs(process: psutil.Process) -> bool:
    """It is there, and not only what is left of it until its new parent looks."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
