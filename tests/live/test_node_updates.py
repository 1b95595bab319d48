"""Another version of the node, which a service installs while it serves; a bad one changes nothing."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from node.updates.program import NO_SERVICE
from protos import service_pb2 as pb
from scripts.staging.controller import Controller, RestController, RpcController
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.process import Child
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from scripts.staging.wheel import Environment, wheel
from tests.conftest import Place, connection, daily, gets_in, member, run, talking

ANNA, BERT = (TestUser.new(f"{name}@test") for name in ("anna", "bert"))
BEFORE, NEXT = "1.0.0", "1.1.0.dev5+g585afc077a09"
REFUSED = "The new version did not take over: the lines above say why."


class RealNode(NodeProcess):
    """A node that is executed, not forked, so that it can execute itself again."""

    child = Child


class Service(threading.Thread):
    """Acts as txnode-update.service: installs what is offered as the requested version, and has the node hand over.

    `wheels` are offered by version. `place` is where the node is installed. While `open` is cleared it waits before it
    installs.
    """

    def __init__(self, node: NodeProcess, place: Environment, reports: Path) -> None:
        super().__init__()
        self._node, self._place, self._reports = node, place, reports
        self.wheels: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.open, self.over = threading.Event(), threading.Event()
        self.open.set()

    def run(self) -> None:
        while not self.over.wait(0.05):
            request = self._node.state / "update-request"
            if request.exists():
                self.asked.append(request.read_text())
                (self._reports / "result").unlink(missing_ok=True)
                (self._reports / "said").write_text("  version     installing it\n")
                request.unlink()
                self.open.wait()
                failed = self._install(self.asked[-1].split()[0])
                self._say(failed or "  service     runs and serves")
                (self._reports / "result").write_text("exit-code\n" if failed else "success\n")

    def _install(self, version: str) -> str:
        """Install a version. Returns why not, after the version before is on disk again."""
        self._place.install(self.wheels[version], version)
        heard = len(self._node.lines)
        os.kill(self._node.pid, signal.SIGUSR2)
        ends = "the node was not upgraded: ", "goes on with the core"
        until(lambda: any(word in line for line in self._node.lines[heard:] for word in ends), 60, "it hands over")
        refused = [line for line in self._node.lines[heard:] if ends[0] in line]
        if not refused:
            return ""
        self._place.install(self.wheels[BEFORE], BEFORE)
        self._say(*refused)
        return REFUSED

    def _say(self, *lines: str) -> None:
        with (self._reports / "said").open("a") as said:
            said.write("".join(f"{line}\n" for line in lines))


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    (tmp_path / "reports").mkdir()
    return tmp_path / "reports"


@pytest.fixture
def packed(reports: Path) -> Mapping[str, str]:
    """What the wheels of this test have beside the node's modules."""
    there = f"REPORTS = Path({str(reports)!r})"
    return {"node/handover/program.py": "PATIENCE = 8.0", "node/updates/program.py": there}


@pytest.fixture
def place(tmp_path: Path, packed: Mapping[str, str]) -> Environment:
    return Environment(tmp_path, wheel(BEFORE, packed), BEFORE)


@pytest.fixture
def node(tmp_path: Path, place: Environment) -> Iterator[NodeProcess]:
    node = RealNode(tmp_path, PYTHONPATH="", UPDATES="on")
    node.program = place.twistd
    with node:
        until(lambda: (node.state / "program" / "twisted").is_dir(), 10, "the way back is kept")
        yield node


@pytest.fixture
def service(node: NodeProcess, place: Environment, packed: Mapping[str, str], reports: Path) -> Iterator[Service]:
    service = Service(node, place, reports)
    service.wheels = {BEFORE: wheel(BEFORE, packed), NEXT: wheel(NEXT, packed)}
    service.start()
    yield service
    service.open.set()
    service.over.set()
    service.join()


@pytest.fixture(params=[RestController, RpcController], ids=["rest", "grpc"])
def controller(request: pytest.FixtureRequest, node: NodeProcess) -> Iterator[Controller]:
    with closing(request.param(node)) as controller:
        yield controller


@pytest.fixture
def rest(node: NodeProcess) -> Iterator[Controller]:
    with closing(RestController(node)) as controller:
        yield controller


@pytest.fixture
def home(all_kinds: Mapping[str, Kind]) -> Place:
    return Place(all_kinds["vless-raw"], "home")


def ask(controller: Controller, version: str = "", sha256: str = "") -> pb.Job:
    return controller.call("UpdateNode", pb.Job, pb.UpdateNodeRequest(version=version, sha256=sha256))


def ended(controller: Controller, asked: pb.Job) -> pb.Job:
    def job() -> pb.Job:
        return controller.call("GetJob", pb.Jobs, pb.JobRequest(id=asked.id)).jobs[0]

    until(lambda: job().state in ("done", "failed"), 60, "the update ends")
    return job()


def jobs(controller: Controller) -> Sequence[pb.Job]:
    return controller.call("GetJob", pb.Jobs, pb.JobRequest()).jobs


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_updated(
    controller: Controller, node: NodeProcess, place: Environment, service: Service, home: Place, echo: EchoServer
) -> None:
    """Process and core are the same, no connection is dropped, and a job begun before the update ends after it."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    pid, core = node.pid, node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        done = ended(controller, ask(controller, NEXT, "a" * 64))
        assert (done.state, done.before, done.after) == ("done", BEFORE, NEXT), done
        assert (controller.info().version, place.installed) == (NEXT, NEXT)
        assert service.asked == [f"{NEXT} {'a' * 64}"]
        assert gets_in(home, BERT, echo)
        assert (node.pid, node.core_pids()) == (pid, [core])
        again = ended(controller, ask(controller))
        assert (again.state, again.after) == ("done", NEXT), again
        assert node.core_pids() == [core] and len(service.asked) == 1


BREAK = "raise RuntimeError('broken on purpose')"
_STARTS = f"\nclass Broken(NodeService):\n    def startService(self) -> None:\n        {BREAK}\nNodeService = Broken"
_RECOVERS = f"async def recover(*_: object) -> None:\n    {BREAK}\nXrayPlan.recover = recover"
WRONG = {
    "raises at import": ({"node/tap.py": BREAK}, "broken on purpose"),
    "raises at start": ({"node/tap.py": _STARTS}, "broken on purpose"),
    "raises at the hand-over": ({"drivers/xray/driver.py": _RECOVERS}, "broken on purpose"),
    "does not come up": (
        {"node/tap.py": "import sys\nif '--check' not in sys.argv:\n    import time\n    time.sleep(60)"},
        "within 8 s",
    ),
}


# Each runs a real pip and two upgrades.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrong", daily(["raises at start"], WRONG))
def test_a_wrong_one_changes_nothing(
    wrong: str,
    rest: Controller,
    node: NodeProcess,
    place: Environment,
    service: Service,
    packed: Mapping[str, str],
    home: Place,
    echo: EchoServer,
) -> None:
    """Users notice nothing, the reason is reported, and the service puts the old version back: a restart runs it."""
    added, words = WRONG[wrong]
    service.wheels[NEXT] = wheel(NEXT, {**packed, **added})
    run(rest, [home], [member(ANNA, home), member(BERT, home)])
    core = node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        failed = ended(rest, ask(rest, NEXT))
        assert failed.state == "failed" and re.search(words, failed.text), failed
        assert rest.info().version == BEFORE
        assert gets_in(home, BERT, echo)
        until(lambda: place.installed == BEFORE, 20, "what was there before is there")
        assert node.core_pids() == [core]
    assert [job.state for job in jobs(rest)] == ["failed"]
    node.stop()
    node.start()
    until(lambda: rest.info().running, 15, "it is resumed")
    assert rest.info().version == BEFORE


def said(node: NodeProcess, words: str) -> int:
    return sum(words in line for line in node.lines)


@pytest.mark.nightly
def test_a_signal_while_it_is_installed(
    rest: Controller, node: NodeProcess, place: Environment, service: Service, home: Place, echo: EchoServer
) -> None:
    """The node hands over at once, to what is installed, and its next process goes on with the job."""
    run(rest, [home], [member(ANNA, home)])
    core = node.newest_core()
    service.open.clear()
    with connection(home, ANNA, echo) as link, talking(link):
        asked = ask(rest, NEXT)
        until(lambda: jobs(rest)[0].text == "version installing it", 30, "it is being installed")
        os.kill(node.pid, signal.SIGUSR2)
        until(lambda: said(node, "is ready") == 2, 20, "the node has handed over")
        assert (rest.info().version, jobs(rest)[0].state) == (BEFORE, "running")
        service.open.set()
        done = ended(rest, asked)
        assert (done.state, done.after, rest.info().version, place.installed) == ("done", NEXT, NEXT, NEXT), done
        assert len(jobs(rest)) == 1 and node.core_pids() == [core]


@pytest.mark.nightly
def test_a_node_that_is_stopped_meanwhile(
    rest: Controller, node: NodeProcess, place: Environment, service: Service, home: Place
) -> None:
    """The service goes on, and the next start with the job."""
    run(rest, [home], [member(ANNA, home)])
    service.open.clear()
    asked = ask(rest, NEXT)
    until(lambda: jobs(rest)[0].text == "version installing it", 30, "it is being installed")
    node.stop()
    node.start()
    until(lambda: rest.info().running, 15, "it is resumed")
    assert (rest.info().version, jobs(rest)[0].state) == (BEFORE, "running")
    service.open.set()
    done = ended(rest, asked)
    assert (done.state, done.after, place.installed) == ("done", NEXT, NEXT), done


@pytest.mark.slow
def test_a_node_of_a_clone(tmp_path: Path) -> None:
    """Without the service no version is installed; the node can be upgraded in place to the copy's current code."""
    with RealNode(tmp_path, UPDATES="on") as node, closing(RestController(node)) as controller:
        failed = ended(controller, ask(controller, NEXT))
        assert (failed.state, failed.text) == ("failed", NO_SERVICE)
        assert not (node.state / "update-request").exists()
        assert ended(controller, ask(controller)).state == "done"
