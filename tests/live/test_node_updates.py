"""Another version of the node, downloaded as a wheel and installed by pip while it serves; bad ones change nothing."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

from protos import service_pb2 as pb
from scripts.staging.controller import Controller, RestController, RpcController
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.mirror import Mirror
from scripts.staging.node import NodeProcess
from scripts.staging.process import Child
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from scripts.staging.wheel import Environment, wheel
from tests.conftest import Place, connection, daily, gets_in, member, run, talking
from tests.harness.signing import Signer

ANNA, BERT = (TestUser.new(f"{name}@test") for name in ("anna", "bert"))
BEFORE, NEXT = "1.0.0", "1.1.0.dev5+g585afc077a09"


class RealNode(NodeProcess):
    """A node that is executed, not forked, so that it can execute itself again."""

    child = Child


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with Mirror() as mirror:
        yield mirror


@pytest.fixture
def place(tmp_path: Path) -> Environment:
    return Environment(tmp_path, wheel(BEFORE, {"node/handover/program.py": "PATIENCE = 8.0"}), BEFORE)


@pytest.fixture
def node(tmp_path: Path, place: Environment, mirror: Mirror) -> Iterator[NodeProcess]:
    node = RealNode(tmp_path, PYTHONPATH="", UPDATES="on", UPDATE_URL=mirror.url)
    node.program = place.twistd
    with node:
        until(lambda: (node.state / "program" / "twisted").is_dir(), 10, "the way back is kept")
        yield node


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


def offered(mirror: Mirror, packed: bytes) -> str:
    return mirror.put(f"/{quote(f'txnode-{NEXT}-py3-none-any.whl')}", packed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_updated(
    controller: Controller, node: NodeProcess, place: Environment, mirror: Mirror, home: Place, echo: EchoServer
) -> None:
    """Process and core are the same, no connection is dropped, and a job begun before the update ends after it."""
    digest = offered(mirror, wheel(NEXT))
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    pid, core = node.pid, node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        done = ended(controller, ask(controller, NEXT, digest))
        assert (done.state, done.before, done.after) == ("done", BEFORE, NEXT), done
        assert (controller.info().version, place.installed) == (NEXT, NEXT)
        assert gets_in(home, BERT, echo)
        assert (node.pid, node.core_pids()) == (pid, [core])
        again = ended(controller, ask(controller))
        assert (again.state, again.after) == ("done", NEXT), again
        assert node.core_pids() == [core]


BREAK = "raise RuntimeError('broken on purpose')"
_STARTS = f"\nclass Broken(NodeService):\n    def startService(self) -> None:\n        {BREAK}\nNodeService = Broken"
_RECOVERS = f"async def recover(*_: object) -> None:\n    {BREAK}\nXrayPlan.recover = recover"
WRONG = {
    "another digest": (wheel(NEXT), "has the SHA-256"),
    "what it needs is not there": (wheel(NEXT, needs="nothing-that-there-is"), "nothing-that-there-is"),
    "raises at import": (wheel(NEXT, {"node/tap.py": BREAK}), "broken on purpose"),
    "raises at start": (wheel(NEXT, {"node/tap.py": _STARTS}), "broken on purpose"),
    "raises at the hand-over": (
        wheel(NEXT, {"drivers/xray/driver.py": _RECOVERS}),
        "broken on purpose",
    ),
    "does not come up": (
        wheel(NEXT, {"node/tap.py": "import sys\nif '--check' not in sys.argv:\n    import time\n    time.sleep(60)"}),
        "within 8 s",
    ),
}


# Each runs a real pip and two upgrades.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrong", daily(["raises at start"], WRONG))
def test_a_wrong_one_changes_nothing(
    wrong: str, rest: Controller, node: NodeProcess, place: Environment, mirror: Mirror, home: Place, echo: EchoServer
) -> None:
    """Users notice nothing, the reason is reported, and the old version is back on disk: a restart runs it."""
    packed, words = WRONG[wrong]
    digest = offered(mirror, packed)
    if wrong == "another digest":
        digest = hashlib.sha256(b"another").hexdigest()
    run(rest, [home], [member(ANNA, home), member(BERT, home)])
    core = node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        failed = ended(rest, ask(rest, NEXT, digest))
        assert failed.state == "failed" and re.search(words, failed.text), failed
        assert rest.info().version == BEFORE
        assert gets_in(home, BERT, echo)
        until(lambda: place.installed == BEFORE, 20, "what was there before is there")
        assert node.core_pids() == [core]
    until(lambda: jobs(rest)[-1].state == "failed", 20, "nothing is under way")
    node.stop()
    node.start()
    until(lambda: rest.info().running, 15, "it is resumed")
    assert rest.info().version == BEFORE


@pytest.mark.nightly
def test_a_build_of_the_same_version(
    rest: Controller, node: NodeProcess, place: Environment, mirror: Mirror, home: Place, echo: EchoServer
) -> None:
    """A failing build is reverted, on disk too, and the job reports it; a good one after it is installed."""
    broken = mirror.put(f"/txnode-{BEFORE}-py3-none-any.whl", wheel(BEFORE, {"node/tap.py": _STARTS}))
    good = offered(mirror, wheel(NEXT))
    run(rest, [home], [member(ANNA, home)])
    core = node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        failed = ended(rest, ask(rest, BEFORE, broken))
        assert failed.state == "failed" and "broken on purpose" in failed.text, failed
        # The node that goes on has put back what was there, in the same job.
        assert [each.state for each in jobs(rest)] == ["failed"]
        assert _STARTS not in (place.modules / "node" / "tap.py").read_text()
        done = ended(rest, ask(rest, NEXT, good))
        assert (done.state, done.after, rest.info().version, place.installed) == ("done", NEXT, NEXT, NEXT), done
        assert node.core_pids() == [core]


def said(node: NodeProcess, words: str) -> int:
    return sum(words in line for line in node.lines)


@pytest.mark.nightly
def test_an_upgrade_does_not_wait_for_a_download(
    rest: Controller, node: NodeProcess, mirror: Mirror, home: Place, echo: EchoServer
) -> None:
    """The upgrade ends the download, which reports that and can be requested again."""
    digest = offered(mirror, wheel(NEXT))
    run(rest, [home], [member(ANNA, home)])
    core = node.newest_core()
    mirror.open.clear()
    with connection(home, ANNA, echo) as link, talking(link):
        asked = ask(rest, NEXT, digest)
        until(lambda: jobs(rest)[0].text.startswith("fetching"), 20, "it is being fetched")
        os.kill(node.pid, signal.SIGUSR2)
        until(lambda: said(node, "is ready") == 2, 20, "the node is upgraded")
        failed = ended(rest, asked)
        assert (failed.state, failed.text) == ("failed", "the node was upgraded during this job: ask again")
        mirror.open.set()
        done = ended(rest, ask(rest, NEXT, digest))
        assert (done.state, done.after, rest.info().version) == ("done", NEXT, NEXT), done
        assert node.core_pids() == [core]


@pytest.mark.nightly
def test_a_signal_while_it_is_installed(
    rest: Controller, node: NodeProcess, place: Environment, mirror: Mirror, home: Place, echo: EchoServer
) -> None:
    """The upgrade by the signal waits for the update and is merged with it: there is one, and nothing is reverted."""
    digest = offered(mirror, wheel(NEXT))
    run(rest, [home], [member(ANNA, home)])
    core = node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        asked = ask(rest, NEXT, digest)
        until(lambda: jobs(rest)[0].text == "installing it", 30, "it is being installed")
        os.kill(node.pid, signal.SIGUSR2)
        done = ended(rest, asked)
        assert (done.state, done.after, rest.info().version, place.installed) == ("done", NEXT, NEXT, NEXT), done
        assert len(jobs(rest)) == 1 and node.core_pids() == [core]
        assert said(node, "is ready") == 2 and said(node, "an upgrade is already under way") == 1


@pytest.mark.nightly
def test_a_node_that_is_stopped_meanwhile_starts_again(
    rest: Controller, node: NodeProcess, place: Environment, mirror: Mirror, home: Place
) -> None:
    """If pip is interrupted while it replaces files, the previous version is restored completely."""
    digest = offered(mirror, wheel(NEXT))
    run(rest, [home], [member(ANNA, home)])
    asked = ask(rest, NEXT, digest)

    def job() -> pb.Job:
        return rest.call("GetJob", pb.Jobs, pb.JobRequest(id=asked.id)).jobs[0]

    until(lambda: job().text == "installing it", 30, "it is being installed")
    node.stop()
    assert place.installed == BEFORE
    node.start()
    until(lambda: rest.info().running, 15, "it is resumed")
    assert rest.info().version == BEFORE
    assert job().state == "failed" and "stopped during this job" in job().text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_only_signed_wheels(tmp_path: Path, place: Environment, mirror: Mirror) -> None:
    """With UPDATE_KEY nothing else is installed, also not by the right digest; a signed one needs no digest."""
    signer, packed = Signer(tmp_path / "key"), wheel(NEXT)
    # As the node asks for it: + is %2B.
    digest, signature = offered(mirror, packed), quote(f"/txnode-{NEXT}-py3-none-any.whl.sig")
    node = RealNode(tmp_path, PYTHONPATH="", UPDATES="on", UPDATE_URL=mirror.url, UPDATE_KEY=signer.public)
    node.program = place.twistd
    with node, closing(RestController(node)) as rest:
        until(lambda: (node.state / "program" / "twisted").is_dir(), 10, "the way back is kept")
        missing = ended(rest, ask(rest, NEXT, digest))
        assert missing.state == "failed" and "without a signature" in missing.text, missing
        mirror.put(signature, signer.sign(packed, namespace="file"))
        wrong = ended(rest, ask(rest, NEXT, digest))
        assert wrong.state == "failed" and "not signed by a key of UPDATE_KEY" in wrong.text, wrong
        # A mirror repeats an old release, under a new name.
        mirror.put(signature, signer.sign(before := wheel(BEFORE)))
        offered(mirror, before)
        old = ended(rest, ask(rest, NEXT))
        assert old.state == "failed" and f"not txnode {NEXT}" in old.text, old
        assert place.installed == rest.info().version == BEFORE
        offered(mirror, packed)
        mirror.put(signature, signer.sign(packed))
        done = ended(rest, ask(rest, NEXT))
        assert (done.state, done.after, rest.info().version, place.installed) == ("done", NEXT, NEXT, NEXT), done


def test_a_node_of_a_clone_is_not_installed_over(tmp_path: Path, mirror: Mirror) -> None:
    """The node refuses to replace a working copy; it can be upgraded in place to the copy's current code."""
    with RealNode(tmp_path, UPDATES="on", UPDATE_URL=mirror.url) as node, closing(RestController(node)) as controller:
        failed = ended(controller, ask(controller, NEXT, "0" * 64))
        assert failed.state == "failed" and "clone" in failed.text
        assert mirror.asked == []
        assert ended(controller, ask(controller)).state == "done"
