"""Other releases of cores and geo files are downloaded and applied while users are connected."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from drivers.install.install import version_of
from drivers.install.releases import CORES
from protos import service_pb2 as pb
from scripts.staging.controller import Controller, ControllerError, RestController, RpcController
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.mirror import Mirror, listing, release, renamed
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, gets_in, member, run, stays_out, talking
from tests.harness.grounds import Ground

ANNA, BERT = (TestUser.new(f"{name}@test") for name in ("anna", "bert"))


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with Mirror() as mirror:
        yield mirror


@pytest.fixture
def updated(tmp_path: Path, mirror: Mirror) -> Iterator[NodeProcess]:
    with NodeProcess(
        tmp_path,
        UPDATES="on",
        XRAY_DOWNLOAD_URL=mirror.url,
        SING_BOX_DOWNLOAD_URL=mirror.url,
        GEO_URL=f"{mirror.url}/geo",
    ) as node:
        yield node


@pytest.fixture(params=[RestController, RpcController], ids=["rest", "grpc"])
def controller(request: pytest.FixtureRequest, updated: NodeProcess) -> Iterator[Controller]:
    with closing(request.param(updated)) as controller:
        yield controller


@pytest.fixture
def rest(updated: NodeProcess) -> Iterator[Controller]:
    with closing(RestController(updated)) as controller:
        yield controller


def known(ground: Ground) -> str:
    return version_of(CORES[ground.name][0], ground.executable())


def newer(ground: Ground) -> str:
    """A later version of this core's minor release, which no release has: the node treats the core by its version."""
    head, _, tail = known(ground).rpartition(".")
    return f"{head}.{int(tail) + 50}"


def offered(mirror: Mirror, ground: Ground, before: str = "") -> str:
    """Put another release on the mirror. Returns the digest of its archive."""
    program = renamed(ground.executable(), known(ground), newer(ground), before)
    return mirror.put(*release(ground.name, newer(ground), program))


def ask(controller: Controller, ground: Ground, **words: object) -> pb.Job:
    request = pb.UpdateCoreRequest(type=ground.type, **words)  # type: ignore[arg-type]
    return controller.call("UpdateCore", pb.Job, request)


def job(controller: Controller, asked: pb.Job) -> pb.Job:
    return controller.call("GetJob", pb.Jobs, pb.JobRequest(id=asked.id)).jobs[0]


def ended(controller: Controller, asked: pb.Job, seconds: float = 40) -> pb.Job:
    until(lambda: job(controller, asked).state in ("done", "failed"), seconds, f"the update ends: {asked}")
    return job(controller, asked)


@pytest.mark.slow
def test_a_core_is_updated_and_goes_back(
    updated: NodeProcess, controller: Controller, mirror: Mirror, ground: Ground, home: Place, echo: EchoServer
) -> None:
    """No connection is dropped, bytes are exact, and the release survives a restart; the same for going back."""
    digest = offered(mirror, ground)
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    before = known(ground)
    with connection(home, ANNA, echo) as link, talking(link):
        asked = ask(controller, ground, version=newer(ground), sha256=digest)
        assert ask(controller, ground, version=newer(ground), sha256=digest).id == asked.id
        done = ended(controller, asked)
        assert (done.state, done.before, done.after) == ("done", before, newer(ground)), done
        assert controller.info().core_version == newer(ground)
        assert gets_in(home, BERT, echo)
        controller.sync_user(member(BERT))
        assert stays_out(home, BERT, echo)
        back = ended(controller, ask(controller, ground, back=True))
        assert (back.state, back.after) == ("done", before), back
        assert controller.info().core_version == before
        again = ended(controller, ask(controller, ground, back=True))
        assert (again.state, again.after) == ("done", newer(ground)), again
    updated.kill()
    updated.start()
    until(lambda: controller.info().running, 15, "it is resumed")
    assert controller.info().core_version == newer(ground)
    assert gets_in(home, ANNA, echo)
    assert [each.state for each in controller.call("GetJob", pb.Jobs, pb.JobRequest()).jobs] == ["done"] * 3


WRONG = {
    "another digest": ("", "has the SHA-256"),
    "it does not run": ("exit 3", "failed soon|ended|exit code 3|cannot|refus"),
    "it dies on probation": (
        '[ "$1" = run ] && [ "$2" != -test ] && ( sleep 2; [ -e /proc/$$ ] && kill -9 $$ ) &',
        "failed soon|signal 9",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_core_changes_nothing(
    wrong: str, rest: Controller, mirror: Mirror, ground: Ground, home: Place, echo: EchoServer
) -> None:
    """Users are not affected, the old core runs on and starts next, the reason is reported."""
    before, words = WRONG[wrong]
    digest = offered(mirror, ground, before)
    if wrong == "another digest":
        digest = hashlib.sha256(b"another").hexdigest()
    run(rest, [home], [member(ANNA, home), member(BERT, home)])
    version = rest.info().core_version
    with connection(home, ANNA, echo) as link, talking(link):
        failed = ended(rest, ask(rest, ground, version=newer(ground), sha256=digest))
        assert failed.state == "failed"
        assert re.search(words, failed.text), failed.text
        assert rest.info().running and rest.info().core_version == version
        assert gets_in(home, BERT, echo)
    rest.stop()
    run(rest, [home], [member(ANNA, home)])
    assert rest.info().core_version == version
    assert gets_in(home, ANNA, echo)


def test_nothing_is_run_that_was_not_named(rest: Controller, ground: Ground) -> None:
    """Neither a version without a digest, nor one that is a path, is accepted."""
    for version, words in (("99.1.1", "no digest"), ("../../tmp", "not a version")):
        failed = ended(rest, ask(rest, ground, version=version))
        assert failed.state == "failed" and words in failed.text
    with pytest.raises(ControllerError, match="either"):
        ask(rest, ground)
    with pytest.raises(ControllerError, match="no job"):
        job(rest, pb.Job(id="none"))


def test_a_key_does_not_replace_programs_unless_it_may(tmp_path: Path, ground: Ground) -> None:
    """Updates of programs are off by default; those of geo files are on, and can be turned off."""
    with NodeProcess(tmp_path, GEO_UPDATES="off") as node, closing(RestController(node)) as controller:
        for name, request in (
            ("UpdateCore", pb.UpdateCoreRequest(version="26.9.30")),
            ("UpdateNode", pb.UpdateNodeRequest()),
            ("UpdateGeoFiles", pb.UpdateGeoFilesRequest()),
        ):
            with pytest.raises(ControllerError, match="UPDATES="):
                controller.call(name, pb.Job, request)


@pytest.mark.slow
def test_a_download_goes_on_where_it_broke_off(rest: Controller, mirror: Mirror, ground: Ground) -> None:
    """Within one job, and in the next job after a longer outage."""
    digest = offered(mirror, ground)
    [path] = mirror.files
    mirror.breaks = [50, 100]
    done = ended(rest, ask(rest, ground, version=newer(ground), sha256=digest))
    assert done.state == "done", done
    assert mirror.asked == [(path, 0), (path, 50), (path, 150)]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["fetching", "switching to it"])
@pytest.mark.turns("moment")
def test_a_node_that_dies_meanwhile(
    moment: str, updated: NodeProcess, rest: Controller, mirror: Mirror, ground: Ground, home: Place, echo: EchoServer
) -> None:
    """It restarts with the old core, reports the update as lost, and it can be requested again."""
    digest = offered(mirror, ground)
    run(rest, [home], [member(ANNA, home)])
    version = rest.info().core_version
    if moment == "fetching":
        mirror.open.clear()
    asked = ask(rest, ground, version=newer(ground), sha256=digest)
    until(lambda: job(rest, asked).text.startswith(moment), 20, moment)
    updated.kill()
    mirror.open.set()
    updated.start()
    until(lambda: rest.info().running, 15, "it is resumed")
    assert rest.info().core_version == version
    assert job(rest, asked).state == "failed" and "stopped during this job" in job(rest, asked).text
    assert gets_in(home, ANNA, echo)
    assert ended(rest, ask(rest, ground, version=newer(ground), sha256=digest)).state == "done"
    assert rest.info().core_version == newer(ground)


ELSEWHERE = listing(private="10.0.0.0/8", blocked="203.0.113.0/24")
HERE = listing(private="10.0.0.0/8", blocked="127.0.0.0/8")


class Listed:
    """A node whose core blocks a list, and a mirror with other lists."""

    def __init__(self, node: NodeProcess, controller: Controller, mirror: Mirror) -> None:
        self.node, self.controller, self.mirror = node, controller, mirror

    def offer(self, content: bytes, digest: str = "") -> str:
        found = self.mirror.put("/geo/geoip.dat", content)
        self.mirror.put("/geo/geoip.dat.sha256sum", f"{digest or found}  geoip.dat\n".encode())
        return found

    def update(self, *files: tuple[str, str], back: bool = False) -> pb.Job:
        named = [pb.GeoFile(name=name, sha256=digest) for name, digest in files]
        request = pb.UpdateGeoFilesRequest(files=named, back=back)
        return ended(self.controller, self.controller.call("UpdateGeoFiles", pb.Job, request))

    def start(self, home: Place, echo: EchoServer) -> None:
        self.home, self.echo = home, echo
        routing = {"rules": [{"ip": ["geoip:blocked"], "outboundTag": "block"}]}
        outbounds = [
            {"tag": "direct", "protocol": "freedom", "settings": {"finalRules": [{"action": "allow"}]}},
            {"tag": "block", "protocol": "blackhole"},
        ]
        run(self.controller, [home], [member(ANNA, home)], routing=routing, outbounds=outbounds)

    def read(self, done: pb.Job) -> None:
        """Restart a core that would read the lists within the hour; the update has replaced an older one."""
        if "within the hour" in done.text:
            core = self.node.newest_core()
            os.kill(core, signal.SIGKILL)
            until(lambda: self.node.core_pids() not in ([], [core]), 15, "the core is back")

    def gets_in(self) -> bool:
        return gets_in(self.home, ANNA, self.echo)


GEOIP = ("geoip.dat", "")


@pytest.fixture
def listed(
    updated: NodeProcess, rest: Controller, mirror: Mirror, all_kinds: Mapping[str, Kind], echo: EchoServer
) -> Listed:
    found = Listed(updated, rest, mirror)
    found.offer(ELSEWHERE)
    assert found.update(GEOIP).state == "done"
    found.start(Place(all_kinds["vless-raw"], "home"), echo)
    assert found.gets_in()
    return found


@pytest.mark.slow
def test_geo_files_are_updated_and_go_back(listed: Listed, echo: EchoServer) -> None:
    """The core uses the new lists, connections stay; lists survive a restart; the same for going back."""
    core = listed.node.newest_core()
    with connection(listed.home, ANNA, echo) as link, talking(link):
        assert listed.update(GEOIP).text == "the geo files are already the newest"
        assert listed.node.newest_core() == core
        listed.offer(HERE)
        done = listed.update(GEOIP)
        assert done.state == "done", done
    listed.read(done)
    until(lambda: not listed.gets_in(), 10, "the list is in force")
    listed.node.kill()
    listed.node.start()
    until(lambda: listed.controller.info().running, 15, "it is resumed")
    assert not listed.gets_in()
    done = listed.update(back=True)
    assert done.state == "done", done
    listed.read(done)
    until(listed.gets_in, 10, "the list before is in force")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "digest", "words"),
    [
        (HERE, hashlib.sha256(b"another").hexdigest(), "has the SHA-256"),
        (listing(private="10.0.0.0/8"), "", "blocked|BLOCKED"),
        (b"no list at all", "", "geoip"),
    ],
    ids=["another digest", "without what is named", "no list"],
)
@pytest.mark.turns("content", "digest", "words")
def test_wrong_geo_files_change_nothing(listed: Listed, content: bytes, digest: str, words: str) -> None:
    """The reason is reported, the old lists are used, also by the next core."""
    listed.offer(content, digest)
    failed = listed.update(GEOIP)
    assert failed.state == "failed" and re.search(words, failed.text), failed
    assert listed.gets_in()
    os.kill(listed.node.newest_core(), signal.SIGKILL)
    until(listed.gets_in, 15, "it is served again")
    listed.node.stop()
    listed.node.start()
    until(lambda: listed.controller.info().running, 15, "it is resumed")
    assert listed.gets_in()


def test_geo_files_come_by_themselves(tmp_path: Path, mirror: Mirror) -> None:
    """With a schedule, for the first time soon after the start."""
    mirror.put("/geo/geosite.dat", b"")
    for name, content in (("geoip.dat", HERE), ("geosite.dat", b"")):
        digest = mirror.put(f"/geo/{name}", content)
        mirror.put(f"/geo/{name}.sha256sum", f"{digest}  {name}\n".encode())
    settings = {"GEO_URL": f"{mirror.url}/geo", "GEO_UPDATE": "weekly"}
    with NodeProcess(tmp_path, **settings) as node, closing(RestController(node)) as controller:
        until(lambda: jobs(controller), 10, "it looks by itself")
        done = ended(controller, jobs(controller)[0])
        assert done.state == "done", done
        node.stop()
        node.start()
        assert [each.id for each in jobs(controller)] == [done.id]


def jobs(controller: Controller) -> list[pb.Job]:
    return list(controller.call("GetJob", pb.Jobs, pb.JobRequest()).jobs)
