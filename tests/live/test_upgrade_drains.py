"""The node upgrades itself in place while cores drain: it hands over all of them, and each drains to its end."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from protos.service_pb2 import Inbounds, UsersStat
from scripts.staging import transfer
from scripts.staging.controller import Controller, RestController, traffic
from scripts.staging.core import XrayClient
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.version import Version
from scripts.staging.wait import until
from tests.conftest import Place, connection, daily, gets_in, member, run, stays_out, talking
from tests.harness.grounds import Ground
from tests.harness.upgraded import FAILED, READY, RealNode, die_in_between, kept, said, upgrade
from tests.live.test_overlap import GONE, core, ended, listens, only, runs

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
MIB = 1024 * 1024
# The longest drain of a core, in seconds, in tests of it.
DRAIN = 14.0


@pytest.fixture
def version(tmp_path: Path) -> Version:
    return Version(tmp_path)


@pytest.fixture
def settings() -> dict[str, str]:
    return {}


@pytest.fixture
def real(tmp_path: Path, version: Version, settings: dict[str, str]) -> Iterator[NodeProcess]:
    with RealNode(tmp_path, PYTHONPATH=str(version.root), **settings) as node:
        kept(node)
        yield node


@pytest.fixture
def controller(real: NodeProcess) -> Iterator[Controller]:
    with closing(RestController(real)) as controller:
        yield controller


class House:
    """An inbound that each configuration has, and another one that differs."""

    def __init__(self, node: NodeProcess, controller: Controller, kinds: Mapping[str, Kind], ground: Ground) -> None:
        self._node, self._controller, self._kind, self._ground = node, controller, kinds["vless-raw"], ground
        self.home = Place(self._kind, "home", ground=ground)
        # Over UDP: sessions, and separate datagrams.
        self.quic, self.loose = (
            Place(kinds[name], name, ground=ground) for name in ("hysteria2", "shadowsocks-2022-aes-128")
        )
        self._numbers = itertools.count()

    def start(self, *people: TestUser, udp: bool = False) -> int:
        """Start another configuration; the old core drains. Returns the core that serves now."""
        before, other = runs(self._node), Place(self._kind, f"other-{next(self._numbers)}", ground=self._ground)
        places = [self.home, *([self.quic, self.loose] if udp else [])]
        run(self._controller, [*places, other], [member(person, *places) for person in people])
        (new,) = runs(self._node) - before
        return new


@pytest.fixture
def house(real: NodeProcess, controller: Controller, all_kinds: Mapping[str, Kind], ground: Ground) -> House:
    return House(real, controller, all_kinds, ground)


def running(controller: Controller) -> None:
    until(lambda: controller.info().state == "running", 10, "the backend runs")


@pytest.mark.slow
def test_all_of_them_go_on(
    real: NodeProcess, version: Version, house: House, controller: Controller, echo: EchoServer
) -> None:
    """No connection is dropped, new ones reach the newest core, each core drains; another can take over."""
    with ExitStack() as stack:
        cores, links = [], []
        for person in (ANNA, BERT):
            cores.append(house.start(ANNA, BERT, CARL))
            links.append(stack.enter_context(ExitStack()))
            link = links[-1].enter_context(connection(house.home, person, echo))
            links[-1].enter_context(talking(link))
        cores.append(house.start(ANNA, BERT, CARL))
        carl = stack.enter_context(connection(house.home, CARL, echo))
        stack.enter_context(talking(carl))
        for number in range(3):
            version.name(f"9.0.{number}")
            upgrade(real, f"txnode 9.0.{number} is ready")
            running(controller)
            assert runs(real) == {*cores}
            assert gets_in(house.home, BERT, echo)
        assert said(real, "the upgrade waits") == 0
        for number, visit in enumerate(links, 1):
            assert runs(real) == {*cores[number - 1 :]}
            visit.close()
            left = {*cores[number:]}
            until(lambda left=left: runs(real) == left, GONE, "the core behind it ends")  # type: ignore[misc]
            assert gets_in(house.home, ANNA, echo)
        cores.append(house.start(ANNA, CARL))
        assert runs(real) == {*cores[-2:]}
        assert gets_in(house.home, ANNA, echo) and stays_out(house.home, BERT, echo)
        upgrade(real)
        running(controller)
    only(real, cores[-1])
    assert gets_in(house.home, ANNA, echo)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"DRAIN_TIMEOUT": f"{DRAIN:g}"}])
def test_the_time_to_drain_goes_on(real: NodeProcess, house: House, controller: Controller, echo: EchoServer) -> None:
    """An upgrade does not restart the drain's time limit."""
    house.start(ANNA)
    with connection(house.home, ANNA, echo) as link:
        new, began = house.start(ANNA), time.monotonic()
        while time.monotonic() < began + DRAIN / 2:
            upgrade(real)
            running(controller)
        transfer.echo(link, b"still there")
        until(lambda: ended(link), DRAIN, "it is ended")
        assert DRAIN - 1 < time.monotonic() - began < DRAIN + 6
    only(real, new)


@pytest.mark.slow
def test_no_byte_is_lost_or_counted_twice(
    real: NodeProcess, house: House, controller: Controller, echo: EchoServer
) -> None:
    """Also on draining cores."""
    house.start(ANNA, BERT)
    with connection(house.home, ANNA, echo) as anna:
        transfer.download(anna, MIB)
        house.start(ANNA, BERT)
        with connection(house.home, BERT, echo) as bert:
            for _ in range(3):
                transfer.download(anna, MIB)
                transfer.download(bert, MIB)
                upgrade(real)
            transfer.download(anna, MIB)
    want = {ANNA.email: 5 * MIB, BERT.email: 3 * MIB}

    def told() -> bool:
        rows = traffic(controller.stats(UsersStat))
        return all(0 <= rows[email]["downlink"] - bytes < 10_000 for email, bytes in want.items())

    until(told, 10, "all bytes are told once")
    until(lambda: len(runs(real)) == 1, GONE, "the old core ends")
    assert told()
    assert 0 <= traffic(controller.stats(Inbounds))["home"]["downlink"] - 8 * MIB < 100_000


@pytest.mark.slow
def test_what_comes_by_udp(real: NodeProcess, house: House, controller: Controller, echo: EchoServer) -> None:
    """Clients with a session keep it, others reach the serving core, and the next core takes over from it."""
    house.start(ANNA, BERT, CARL, udp=True)
    with connection(house.home, ANNA, echo) as link, talking(link):
        house.start(ANNA, BERT, CARL, udp=True)
        for _ in range(2):
            with connection(house.quic, ANNA, echo) as session, talking(session):
                upgrade(real)
                running(controller)
                assert gets_in(house.quic, BERT, echo) and gets_in(house.loose, BERT, echo)
        new = house.start(ANNA, BERT, udp=True)
        for place in (house.quic, house.loose):
            assert gets_in(place, BERT, echo) and stays_out(place, CARL, echo)
        upgrade(real)
        running(controller)
        assert gets_in(house.quic, BERT, echo)
    only(real, new)
    assert gets_in(house.quic, BERT, echo)


@pytest.mark.slow
def test_who_is_removed(real: NodeProcess, house: House, controller: Controller, echo: EchoServer) -> None:
    """A removed user's connections are cut after an upgrade, too, and no others."""
    house.start(ANNA, BERT)
    with connection(house.home, ANNA, echo) as anna, connection(house.home, BERT, echo) as bert:
        house.start(ANNA, BERT)
        upgrade(real)
        running(controller)
        with talking(bert):
            controller.sync_user(member(ANNA))
            until(lambda: ended(anna), 10, "she is out")
        assert stays_out(house.home, ANNA, echo) and gets_in(house.home, BERT, echo)


@pytest.mark.slow
def test_lines_of_one_that_drains(
    real: NodeProcess, house: House, ground: Ground, controller: Controller, echo: EchoServer
) -> None:
    """None is lost or repeated, of requests on a connection that carries many."""
    level = {} if ground.name == "xray" else {"log": {"level": "info"}}
    words = "accepted" if ground.name == "xray" else "inbound connection to"
    with closing(RestController(real)) as reading, reading.logs(patience=40) as reader:
        home = Place(house.home.kind, "home", ground=ground)
        run(controller, [home], [member(ANNA, home)], **level)
        old, port = core(real), free_port()
        mux = {"mux": {"enabled": True, "concurrency": 128}}
        with XrayClient({port: {**home.outbound(ANNA), **mux}}), transfer.connect(port, echo) as link:
            made = 1
            other = Place(house.home.kind, "other", ground=ground)
            run(controller, [home, other], [member(ANNA, home)], **level)
            for _ in range(3):
                before = said(real, READY)
                os.kill(real.pid, signal.SIGUSR2)
                while said(real, READY) == before:
                    transfer.connect(port, echo).close()
                    made += 1
            transfer.echo(link, b"still there")
            assert old in runs(real)

        def told() -> list[str]:
            return [line for line in reader.lines if words in line and str(echo.port) in line]

        until(lambda: len(told()) >= made, 10, "all are told of")
        assert len(told()) == made


# Faults of a version that takes over several cores.
BROKEN: Mapping[str, tuple[str, str, str]] = {
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
    "at start": (
        "node/tap.py",
        "def _broken(self):\n    raise RuntimeError('no start')\nNodeService.startService = _broken",
        "no start",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", daily(["at what they share"], BROKEN))
def test_a_wrong_version(
    fault: str, real: NodeProcess, version: Version, house: House, controller: Controller, echo: EchoServer
) -> None:
    """The old version takes all cores back, with their shared listeners."""
    module, code, words = BROKEN[fault]
    old = house.start(ANNA, BERT)
    with connection(house.home, ANNA, echo) as link:
        cores = {old, house.start(ANNA, BERT)}
        with talking(link):
            version.name("9.9.9")
            version.add(module, code)
            upgrade(real, FAILED)
            running(controller)
            assert words in next(line for line in real.lines if FAILED in line)
            assert controller.info().version != "9.9.9"
            assert runs(real) == cores
            new = house.start(ANNA, BERT)
            assert gets_in(house.home, BERT, echo)
        assert runs(real) == {*cores, new}
    only(real, new)
    assert gets_in(house.home, ANNA, echo)


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["the one that drains", "the one that serves"])
def test_one_that_dies_in_between(
    dies: str, real: NodeProcess, version: Version, house: House, controller: Controller, echo: EchoServer
) -> None:
    """The others stay; the serving core is replaced by another, and no other connection is dropped."""
    first = house.start(ANNA, BERT)
    with ExitStack() as stack:
        links: dict[int, Callable[[], bool]] = {}
        for next_one in (True, True, False):
            pid = max(runs(real) - links.keys(), default=first)
            link = stack.enter_context(connection(house.home, ANNA, echo))
            links[pid] = lambda link=link: ended(link)  # type: ignore[misc]
            if next_one:
                house.start(ANNA, BERT)
        old, _, current = links
        dead = old if dies == "the one that drains" else current
        die_in_between(version, dead)
        version.name("9.0.0")
        upgrade(real, "txnode 9.0.0 is ready")
        until(lambda: gets_in(house.home, BERT, echo), 20, "Bert gets in")
        running(controller)
        assert said(real, FAILED) == 0
        assert [pid for pid, is_over in links.items() if is_over()] == [dead]
        there = runs(real)
        assert links.keys() - there == {dead} and len(there) == (2 if dead == old else 3)
        house.start(ANNA, BERT)
        assert gets_in(house.home, BERT, echo)


@pytest.mark.slow
def test_one_on_probation(
    real: NodeProcess, version: Version, house: House, controller: Controller, echo: EchoServer
) -> None:
    """A new core that took over just before the upgrade and fails just after it gives way to the old one."""
    version.add("node/backend/probation.py", "SECONDS = 60.0")
    upgrade(real)
    old = house.start(ANNA)
    with connection(house.home, ANNA, echo) as link:
        new = house.start(ANNA, BERT)
        with talking(link):
            upgrade(real)
            running(controller)
            assert runs(real) == {old, new}
            os.kill(new, signal.SIGKILL)
            until(
                lambda: any("failed soon after taking over" in warning for warning in controller.info().warnings),
                10,
                "it goes back",
            )
            until(lambda: gets_in(house.home, ANNA, echo), 10, "Anna gets in")
        assert runs(real) == {old} and listens(old, house.home.port)


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
