"""The node upgrades itself to a version that does not come up: the old one takes its cores back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.staging.controller import Controller, RestController
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.version import Version
from scripts.staging.wait import until
from tests.conftest import Place, connection, daily, gets_in, member, run, stays_out, talking
from tests.harness.grounds import Ground
from tests.harness.upgraded import FAILED, RealNode, kept, upgrade
from tests.live.test_next_node import House, running
from tests.live.test_overlap import only, runs

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
MIB = 1024 * 1024


@pytest.fixture
def version(tmp_path: Path, request: pytest.FixtureRequest) -> Version:
    version = Version(tmp_path)
    if "hangs" in request.node.name:
        version.add("node/handover/program.py", "PATIENCE = 8.0")
    return version


@pytest.fixture
def real(tmp_path: Path, version: Version) -> Iterator[NodeProcess]:
    with RealNode(tmp_path, PYTHONPATH=str(version.root)) as node:
        kept(node)
        yield node


@pytest.fixture
def controller(real: NodeProcess) -> Iterator[Controller]:
    with closing(RestController(real)) as controller:
        yield controller


@pytest.fixture
def house(real: NodeProcess, controller: Controller, all_kinds: Mapping[str, Kind], ground: Ground) -> House:
    return House(real, controller, all_kinds, ground)


# Faults of a version, by where they show, and the operator's message.
BROKEN: Mapping[str, tuple[str, str, str]] = {
    "at import": ("node/settings.py", "raise RuntimeError('no import')", "no import"),
    "at start": (
        "node/tap.py",
        "def _broken(self):\n    raise RuntimeError('no start')\nNodeService.startService = _broken",
        "no start",
    ),
    "ends": (
        "node/tap.py",
        "def _broken(self):\n    raise SystemExit('no more')\nNodeService.startService = _broken",
        "no more",
    ),
    "hangs": (
        "node/tap.py",
        "import time\ndef _broken(self):\n    while True: time.sleep(0.1)\nNodeService.startService = _broken",
        "did not come up",
    ),
    "with everything opened": (
        "node/door/ports.py",
        "def _broken(self):\n    raise RuntimeError('no ports')\nPorts._metrics_site = _broken",
        "no ports",
    ),
    "hangs with everything opened": (
        "node/door/ports.py",
        "import time\ndef _broken(self):\n    while True: time.sleep(0.1)\nPorts._metrics_site = _broken",
        "did not come up",
    ),
    "when all is there": (
        "node/tap.py",
        "def _broken(self):\n    raise RuntimeError('not ready')\nNodeService._ready = _broken",
        "RuntimeError: not ready",
    ),
    "at the hand-over": (
        "node/engine/leaving.py",
        "def _broken(self, left, heirs):\n    async def no(plan):\n        heirs.failed('no hand-over')\n"
        "    self._heirs = heirs\n    self._runner.supervisor.replacement.recover = no\nLeaving.inherit = _broken",
        "no hand-over",
    ),
}
# Faults while a core drains.
DRAINING: Mapping[str, tuple[str, str, str]] = {
    "at one that drains": (
        "node/engine/leaving.py",
        "_one = Leaving._one\nasync def _broken(self, left, plan, accepted, heirs, exact):\n"
        "    if accepted is not None:\n        heirs.go_back('no way to drain')\n"
        "    return await _one(self, left, plan, accepted, heirs, exact)\nLeaving._one = _broken",
        "no way to drain",
    ),
    "at what they share": (
        "drivers/process/plan.py",
        "def _broken(self, packed):\n    raise CoreFailed('no sharing')\nCoreDriver.go_on = _broken",
        "no sharing",
    ),
    "with two cores, at start": BROKEN["at start"],
}


ALL: Mapping[str, tuple[str, str, str]] = {**BROKEN, **DRAINING}
DAILY = ("at start", "hangs", "at the hand-over", "with everything opened", "at what they share")


@pytest.mark.slow
@pytest.mark.parametrize("fault", daily(DAILY, ALL))
def test_a_wrong_version(
    fault: str, real: NodeProcess, version: Version, house: House, controller: Controller, echo: EchoServer
) -> None:
    """Users are not affected by a version that fails: the old one takes its cores back, and logs the reason."""
    module, code, words = ALL[fault]
    cores = {house.start(ANNA, BERT)}
    with connection(house.home, ANNA, echo) as link:
        if fault in DRAINING:
            cores.add(house.start(ANNA, BERT))
        with talking(link):
            version.name("9.9.9")
            version.add(module, code)
            upgrade(real, FAILED)
            running(controller)
            assert words in next(line for line in real.lines if FAILED in line)
            assert controller.info().version != "9.9.9"
            assert runs(real) == cores
            if fault in DRAINING:
                new = house.start(ANNA, BERT)
                assert gets_in(house.home, BERT, echo)
                assert runs(real) == {*cores, new}
    if fault in DRAINING:
        only(real, new)
    assert gets_in(house.home, ANNA, echo) and stays_out(house.home, CARL, echo)


@pytest.mark.nightly
def test_the_watchdog(tmp_path: Path, all_kinds: Mapping[str, Kind], ground: Ground, echo: EchoServer) -> None:
    """It is notified often enough, also if a version hangs: else it would end the node and the core."""
    home = Place(all_kinds["vless-raw"], "home", ground=ground)
    version, silence, heard = Version(tmp_path), 15, [time.monotonic()]
    version.add("node/handover/program.py", "PATIENCE = 8.0")
    module, code, _ = BROKEN["hangs with everything opened"]
    whole = (version.root / module).read_text()
    version.add(module, code)
    hangs = (version.root / module).read_text()
    (version.root / module).write_text(whole)
    there = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def listen() -> None:
        with suppress(OSError):
            while message := there.recv(1000):
                heard.extend([time.monotonic()] * (b"WATCHDOG=1" in message))

    with there:
        there.bind(str(tmp_path / "notify"))
        threading.Thread(target=listen, daemon=True).start()
        settings = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": str(silence * 10**6)}
        with RealNode(tmp_path, PYTHONPATH=str(version.root), **settings) as node:
            kept(node)
            with closing(RestController(node)) as controller:
                run(controller, [home], [member(ANNA, home)])
            with connection(home, ANNA, echo) as link, talking(link):
                (version.root / module).write_text(hangs)
                upgrade(node, FAILED)
            until(lambda: time.monotonic() - heard[-1] < 1, silence, "the version before is heard of")
        there.shutdown(socket.SHUT_RDWR)
    assert max(later - earlier for earlier, later in pairwise(heard)) < silence


@pytest.mark.slow
def test_a_version_from_before_the_keeper(
    real: NodeProcess, version: Version, house: House, controller: Controller, echo: EchoServer
) -> None:
    """It is refused at once, with what to do, and no connection is dropped."""
    old = house.start(ANNA)
    with connection(house.home, ANNA, echo) as link:
        new = house.start(ANNA)
        with talking(link):
            version.name("0.9.0")
            version.add("node/service.py", "KEPT = 'goes on with several cores'")
            upgrade(real, "restart the node to change to it")
    assert runs(real) == {old, new} and gets_in(house.home, ANNA, echo)
