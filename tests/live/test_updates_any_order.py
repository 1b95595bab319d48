"""Updates, users, Starts, limits, crashes and kills in random order: core, memory, disk and jobs agree at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from protos import service_pb2 as pb
from scripts.staging.controller import Controller, RpcController
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.mirror import Mirror, release, renamed
from scripts.staging.node import NodeProcess
from scripts.staging.wait import until
from tests.conftest import Place, control, gets_in, settled
from tests.harness.grounds import Ground
from tests.live.test_limits_any_order import PEOPLE, Chaos, agree
from tests.live.test_updates import known, newer

DYING = '[ "$1" = run ] && [ "$2" != -test ] && ( sleep 2; [ -e /proc/$$ ] && kill -9 $$ ) &'
GEO = ("geoip.dat", "geosite.dat")


class Updated(Chaos):
    """All random operations, and updates, some of them broken."""

    mirror: Mirror
    digests: Mapping[str, str]

    def update_core(self) -> None:
        version = self._chance.choice([*self.digests])
        request = pb.UpdateCoreRequest(
            type=self._place.ground.type,  # type: ignore[arg-type]
            version=version,
            sha256=self.digests[version],
        )
        self._controller.call("UpdateCore", pb.Job, request)

    def go_back(self) -> None:
        request = pb.UpdateCoreRequest(type=self._place.ground.type, back=True)  # type: ignore[arg-type]
        self._controller.call("UpdateCore", pb.Job, request)

    def update_lists(self) -> None:
        for name in GEO:
            digest = self.mirror.put(f"/geo/{name}", self._chance.randbytes(20) if name != GEO[0] else b"")
            self.mirror.put(f"/geo/{name}.sha256sum", digest.encode())
        self._controller.call("UpdateGeoFiles", pb.Job, pb.UpdateGeoFilesRequest(back=self._chance.random() < 0.3))

    def kill_node(self) -> None:
        self.let_it_work(100, 4)
        self._node.kill()
        self._node.start()


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with Mirror() as mirror:
        yield mirror


@pytest.fixture
def node(tmp_path: Path, mirror: Mirror) -> Iterator[NodeProcess]:
    urls = {"XRAY_DOWNLOAD_URL": mirror.url, "SING_BOX_DOWNLOAD_URL": mirror.url, "GEO_URL": f"{mirror.url}/geo"}
    with NodeProcess(tmp_path, UPDATES="on", DRAIN_TIMEOUT="1", **urls) as node:
        yield node


def offered(mirror: Mirror, ground: Ground) -> dict[str, str]:
    """Versions that are valid, one that dies, and one that is missing, with their digests."""
    base, found = known(ground), {"90.1.1": "0" * 64}
    head, _, tail = newer(ground).rpartition(".")
    for number, before in enumerate(("", "", DYING)):
        version = f"{head}.{int(tail) + number}"
        found[version] = mirror.put(*release(ground.name, version, renamed(ground.executable(), base, version, before)))
    return found


def jobs(controller: Controller) -> list[pb.Job]:
    return list(controller.call("GetJob", pb.Jobs, pb.JobRequest()).jobs)


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [False, True], ids=["", "with crashes"])
@pytest.mark.parametrize("seed", [1, 2])
def test_all_agree_at_the_end(
    ground: Ground,
    seed: int,
    crashes: bool,
    node: NodeProcess,
    mirror: Mirror,
    all_kinds: Mapping[str, Kind],
    cover: CoverServer,
    echo: EchoServer,
) -> None:
    """The jobs' version runs, allowed users are admitted, and disk has the current and the previous version."""
    place = Place(all_kinds["vless-raw"], "in", ground=ground)
    Updated.mirror, Updated.digests = mirror, offered(mirror, ground)
    with closing(RpcController(node)) as controller, control(node, "rest") as other:
        chaos, rest = (
            Updated(node, controller, place, echo, seed),
            Updated(node, other, place, echo, seed + 100),
        )
        with settled([place], cover):
            chaos.start()
        words = {chaos.sync_one: 5, chaos.remove_and_add: 2, chaos.sync_all: 2, chaos.start: 1}
        updates = {rest.update_core: 6, rest.go_back: 2, rest.update_lists: 2, rest.carry: 3}
        with ThreadPoolExecutor(3) as pool:
            done = [
                pool.submit(chaos.act, words),
                pool.submit(rest.act, {**updates, **({rest.kill_core: 1} if crashes else {})}),
                pool.submit(rest.act, {rest.kill_node: 1} if crashes else {rest.carry: 1}),
            ]
            for each in done:
                each.result()
        until(lambda: all(job.state in ("done", "failed") for job in jobs(controller)), 120, "all updates end")
        until(lambda: controller.info().running, 60, "the core is there")
        controller.sync_users(chaos.everybody())
        until(lambda: agree(node, controller, place), 30, "core and memory agree")
        until(lambda: len(node.core_pids()) == 1, 20, "there is one core")
        version = controller.info().core_version
        node.kill()
        node.start()
        agree_on_disk(node, ground, version)
        until(lambda: controller.info().running, 30, "it is resumed")
        assert controller.info().core_version == version
        controller.set_limits({person.email: None for person in PEOPLE})
        assert any(gets_in(place, person, echo) for person in PEOPLE)


def agree_on_disk(node: NodeProcess, ground: Ground, version: str) -> None:
    """The chosen versions run; only they and the previous ones of releases and lists are on disk."""
    updates = node.state / "updates"
    if not (updates / "chosen").exists():
        assert version == known(ground)
        return
    chosen = json.loads((updates / "chosen").read_text())["chosen"]
    core = chosen.get(ground.name, {"path": "", "before": ""})
    assert version == (core["path"].split(f"{ground.name}-")[1].split("-")[0] if core["path"] else known(ground))
    for place, name in (("cores", ground.name), ("geo", "geo")):
        there = {str(path) for path in (updates / place).glob("*") if path.is_dir() and not path.name.startswith(".")}
        kept = {chosen.get(name, {}).get(which) or "" for which in ("path", "before")}
        kept |= {str(Path(path).parent) for path in kept if path}
        assert not there - kept
