"""Update jobs: their reports, the file, and a node that stops."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock

from node import __version__
from node.base.errors import InvalidRequest, NodeError, ShuttingDown, size
from node.base.logs import LogRing
from node.updates import program
from node.updates.jobs import KEPT, TEXT, WRITTEN, Jobs, Stage, Step
from node.updates.policy import REGIONS, Policy, Sources
from node.updates.program import LOOK as LOOKS
from node.updates.program import REQUEST, Program
from node.updates.replaceable import Kit, Record, Trial
from node.updates.tool import Tool
from node.updates.updates import GEO, LOOK, NODE, Updates
from protos import service_pb2 as pb
from tests.node.updates.pool import pooled


def updates(directory: Path, now: Callable[[], float] = lambda: 1e9, **policy: Any) -> Updates:
    """Make the updates of a node that has no core and runs no programs."""
    clock = Clock()

    async def never(*_: object, **__: object) -> Any:
        await Deferred()

    nothing = cast(Any, None)
    record = Record(directory / "chosen")
    kit = Kit(pooled(clock), directory, Tool(never, {}), Trial(clock, nothing), record, now)
    drivers: dict[int, Any] = {pb.XRAY: cast(Any, SimpleNamespace(name="xray"))}
    node = Program(kit, directory, nothing)
    return Updates(kit, jobs(directory), node, drivers, Policy(programs=True, **policy), Sources({}, pb.XRAY))


def got(found: Updates) -> Sequence[pb.Job]:
    reply: pb.Jobs = cast(Any, ensureDeferred(found.get(pb.JobRequest()))).result
    return reply.jobs


def left(directory: Path, *jobs: pb.Job) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "jobs").write_bytes(pb.Jobs(jobs=jobs).SerializeToString())


def test_a_job_that_waited_is_not_done(tmp_path: Path) -> None:
    """An update of the node succeeds; the next one, to another version, is not reported as done by that."""
    first = pb.Job(id="1", kind=NODE, state="running", after=__version__)
    left(tmp_path, first, pb.Job(id="2", kind=NODE, subject="txnode 9.9.9", state="waiting"))
    found = updates(tmp_path)
    found.start()
    found.settle("")
    ended = got(found)
    assert [(job.id, job.state, job.after) for job in ended] == [("1", "done", __version__), ("2", "failed", "")]


@pytest.mark.parametrize(
    ("outcome", "before", "after", "state"),
    [
        ("", __version__, __version__, "done"),
        ("", "0.9", "", "done"),
        ("", "0.9", "9.9.9", "failed"),
        ("it raised an error", "0.9", __version__, "failed"),
        (None, "0.9", __version__, "done"),
        (None, __version__, __version__, "failed"),
        (None, "0.9", "", "failed"),
    ],
)
def test_an_update_of_the_node_before(outcome: str | None, before: str, after: str, state: str, tmp_path: Path) -> None:
    """A hand-over that succeeded is the version's; of a node that was killed the running version may prove it."""
    left(tmp_path, pb.Job(id="1", kind=NODE, state="running", before=before, after=after))
    found = updates(tmp_path)
    found.start()
    found.settle(outcome)
    [ended] = got(found)
    assert ended.state == state and (state == "failed" or ended.text == f"{__version__} runs")
    assert ended.text == (outcome or ended.text)


@pytest.mark.parametrize("outcome", ["", None, "it raised an error"])
def test_an_update_that_goes_on(outcome: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service goes on after the hand-over: this version may not be ready, and then hands back."""
    monkeypatch.setattr(program, "REPORTS", tmp_path)
    (tmp_path / "said").write_text("  service     handing over to the new version\n")
    left(tmp_path, pb.Job(id="1", kind=NODE, state="running", began=5.0, before="0.9", after=__version__))
    found = updates(tmp_path)
    found.start()
    found.settle(outcome)
    [job] = got(found)
    if outcome:
        assert (job.state, job.text) == ("failed", outcome)
        return
    assert (job.state, job.text, job.began) == ("running", "service handing over to the new version", 5.0)
    assert found.unsteady == "" and found.jobs.goes_on(job)
    (tmp_path / "result").write_text("success")
    (tmp_path / "said").write_text("  service     runs and serves\n")
    cast(Clock, found._kit.reactor).advance(LOOKS)
    [job] = got(found)
    assert (job.state, job.text, job.after) == ("done", "service runs and serves", __version__)


def test_a_request_of_the_node_before(tmp_path: Path) -> None:
    """Its job has failed: nothing is installed later."""
    (tmp_path / REQUEST).touch()
    updates(tmp_path).start()
    assert not (tmp_path / REQUEST).exists()


def test_a_start_on_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the removal of a file fails, whether it exists or not."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    updates(tmp_path).start()


def jobs(directory: Path) -> Jobs:
    clock = Clock()
    journal = cast(Any, SimpleNamespace(tell=lambda *_, **__: None))
    return Jobs(pooled(clock), directory / "jobs", LogRing(cast(Any, clock), 100), journal)


def failing(text: str) -> Callable[[Step], Awaitable[None]]:
    async def work(step: Step) -> None:
        step.say(text)
        raise NodeError(text)

    return work


def test_of_a_long_traceback_the_error_is_kept(tmp_path: Path) -> None:
    found = jobs(tmp_path)
    lines = [f'  File "/a/long/path/{number}.py", line {number}, in call' for number in range(60)]
    found.ask(GEO, "geo files", b"", failing("\n".join([*lines, "RuntimeError: broken", ""])))
    [job] = found.get("")
    assert job.text.endswith(f"{lines[-1]}\nRuntimeError: broken") and TEXT - 100 < size(job.text) <= TEXT


def test_texts_of_servers_are_cut_and_plain(tmp_path: Path) -> None:
    """A server chooses the reason phrase of a status: it must not fill logs and replies or control terminals."""
    found = jobs(tmp_path)
    for number in range(KEPT + 1):
        found.ask(GEO, "geo files", str(number).encode(), failing(f"HTTP Error 404: \x1b[2J{'x' * 60_000}"))
    asked = found.get("")
    assert len(asked) == KEPT
    assert all(job.text.startswith("HTTP Error 404: \\x1b[2Jxxx") and len(job.text) <= TEXT for job in asked)
    assert (tmp_path / "jobs").stat().st_size < KEPT * (TEXT + 200)


@pytest.mark.parametrize(
    "ask",
    [
        lambda found, word: found.core(pb.UpdateCoreRequest(type=pb.XRAY, version=word)),
        lambda found, word: found.core(pb.UpdateCoreRequest(type=pb.XRAY, version="1.2.3", sha256=word)),
        lambda found, word: found.geo(pb.UpdateGeoFilesRequest(files=[pb.GeoFile(name=word)])),
        lambda found, word: found.geo(pb.UpdateGeoFilesRequest(files=[pb.GeoFile(name="geoip.dat", sha256=word)])),
        lambda found, word: found.node(pb.UpdateNodeRequest(version=word)),
        lambda found, word: found.node(pb.UpdateNodeRequest(version="1.0.1", sha256=word)),
    ],
)
def test_a_long_argument_makes_no_job(ask: Callable[[Updates, str], pb.Job], tmp_path: Path) -> None:
    """It would stay in memory while the job waits, on disk after it, and in each reply."""
    found = updates(tmp_path)
    with pytest.raises(InvalidRequest, match="characters"):
        ask(found, "1" * 10_000_000)
    assert not got(found)


def test_unknown_fields_make_no_difference(tmp_path: Path) -> None:
    """They are not kept, and a request with them is the same job."""
    found = updates(tmp_path)
    unknown = pb.UpdateGeoFilesRequest.FromString(b"\xfa\x7f\x80\x08" + b"x" * 1024)
    assert found.geo(unknown).id == found.geo(pb.UpdateGeoFilesRequest()).id


def test_jobs_with_the_same_request_differ(tmp_path: Path) -> None:
    """Regions have files of their own, and the newest version of the node may not be the installed one."""
    found = updates(tmp_path)
    ask = pb.UpdateGeoFilesRequest
    jobs = [found.geo(ask()), *(found.geo(ask(), region) for region in REGIONS)]
    jobs += [found.newest_node(), found.node(pb.UpdateNodeRequest())]
    assert len({job.id for job in jobs}) == len(REGIONS) + 3
    assert found.geo(ask(), "iran") in jobs and found.newest_node() in jobs


def test_a_clock_that_was_ahead_does_not_delay_lists(tmp_path: Path) -> None:
    """The last check has a time in the future, from a machine whose clock was wrong at its start."""
    found = updates(tmp_path, lists_every=86_400.0)
    found._kit.record.looked = 4e9
    found._look()
    assert [job.kind for job in got(found)] == [GEO]


def test_a_check_for_lists_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it succeeds again, or nothing is due."""
    found = updates(tmp_path, lists_every=86_400.0)
    found.start()
    found.settle(None)
    assert found.warnings == []
    monkeypatch.setattr(found, "_asked", 0.0)
    monkeypatch.setattr(found, "geo", lambda _: 1 / 0)
    clock = cast(Clock, found._kit.reactor)
    clock.advance(LOOK)
    assert "checking for newer geo files failed: ZeroDivisionError" in found.warnings[0]
    clock.advance(LOOK)
    assert found.warnings == []


@pytest.mark.parametrize("hangs", [False, True])
def test_a_job_is_done_when_that_is_on_disk(hangs: bool, tmp_path: Path) -> None:
    """A caller who reads that may kill the node at once; a disk that hangs delays the reply only for seconds."""
    found = updates(tmp_path)
    writing = found.jobs._writing
    assert writing.acquire().called
    reply = ensureDeferred(found.get(pb.JobRequest()))
    assert not reply.called
    if hangs:
        cast(Clock, found.jobs._reactor).advance(WRITTEN)
        assert writing.locked and not writing.waiting
    else:
        writing.release()
        assert not writing.locked
    assert reply.result == pb.Jobs()


def test_a_stopping_node_waits_for_cleanup(tmp_path: Path) -> None:
    """The work of a job is cancelled, and can restore what it has changed."""
    found, moment, done = jobs(tmp_path), Deferred[None](), list[str]()

    async def work(_: Step) -> None:
        try:
            await Deferred()
        finally:
            await moment
            done.append("put back")

    job = found.ask(NODE, "txnode", b"", work)
    closed = ensureDeferred(found.stop())
    assert not closed.called
    moment.callback(None)
    assert closed.called and done == ["put back"] and job.state == "failed"


def waiting(found: Jobs, stage: Stage) -> pb.Job:
    """Start a job, up to this stage."""

    async def work(step: Step) -> None:
        step.jobs.stage = stage
        await Deferred()

    return found.ask(GEO, "geo files", b"", work)


def test_a_node_that_stops_while_it_is_updated(tmp_path: Path) -> None:
    """The next process ends the job, or goes on with it."""
    found = jobs(tmp_path)
    waiting(found, Stage.BECOMING)
    assert ensureDeferred(found.stop()).called
    assert [job.state for job in pb.Jobs.FromString((tmp_path / "jobs").read_bytes()).jobs] == ["running"]


@pytest.mark.parametrize(
    ("stage", "holds_up", "ended"),
    [
        (Stage.FETCHING, "", "failed: the node was upgraded during this job: ask again"),
        (Stage.CHANGING, "geo files", "running: begun"),
        (Stage.BECOMING, "", "running: begun"),
    ],
)
def test_an_upgrade_of_the_node(stage: Stage, holds_up: str, ended: str, tmp_path: Path) -> None:
    """It cancels a download; an update that is the upgrade goes on in the next node process."""
    found = jobs(tmp_path)
    job = waiting(found, stage)
    assert found.under_way == holds_up
    leaving = ensureDeferred(found.leave())
    assert leaving.called and f"{job.state}: {job.text}" == ended
    kept = pb.Jobs.FromString((tmp_path / "jobs").read_bytes()).jobs
    assert [f"{each.state}: {each.text}" for each in kept] == [ended]
    with pytest.raises(ShuttingDown):
        found.ask(GEO, "geo files", b"later", failing("no"))
