"""Updates as controllers ask for them: what is said of them, what is kept, and what a node that ends makes of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock

from node import __version__
from node.contract.choices import Choices
from node.errors import InvalidRequest, NodeError
from node.logs import LogRing
from node.updates.chosen import Record
from node.updates.jobs import KEPT, TEXT, Jobs, Step
from node.updates.policy import Policy, Sources
from node.updates.updates import GEO, NODE, Updates
from protos import service_pb2 as pb
from tests.node.updates.pool import pooled


async def nothing(*_: object, **__: object) -> str:
    return ""


def updates(directory: Path, now: Callable[[], float] = lambda: 1e9, **policy: Any) -> Updates:
    """Updates of a node that has no core, and runs no program."""
    clock = Clock()

    async def never(*_: object, **__: object) -> Any:
        await Deferred()

    return Updates(
        pooled(clock),
        directory,
        ring=LogRing(cast(Any, clock), 100),
        journal=cast(Any, SimpleNamespace(tell=lambda *_, **__: None)),
        policy=Policy(programs=True, **policy),
        sources=Sources(),
        drivers={pb.XRAY: cast(Any, SimpleNamespace(name="xray"))},
        runner=cast(Any, None),
        record=Record(directory / "chosen"),
        choices=Choices(),
        run=cast(Any, never),
        environment={},
        test=nothing,
        become=nothing,
        now=now,
    )


def left(directory: Path, *jobs: pb.Job) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "jobs").write_bytes(pb.Jobs(jobs=jobs).SerializeToString())


def test_one_that_waited_was_not_done(tmp_path: Path) -> None:
    """An update of the node ends well; the next one, to yet another version, is not said to be done by that."""
    first = pb.Job(id="1", kind=NODE, state="running", after=__version__)
    left(tmp_path, first, pb.Job(id="2", kind=NODE, subject="txnode 9.9.9", state="waiting"))
    found = updates(tmp_path)
    found.load()
    found.begin("")
    ended = found.get(pb.JobRequest()).jobs
    assert [(job.id, job.state, job.after) for job in ended] == [("1", "done", __version__), ("2", "failed", "")]


def jobs(directory: Path) -> Jobs:
    clock = Clock()
    journal = cast(Any, SimpleNamespace(tell=lambda *_, **__: None))
    return Jobs(pooled(clock), directory / "jobs", LogRing(cast(Any, clock), 100), journal)


def failing(text: str) -> Callable[[Step], Awaitable[None]]:
    async def work(step: Step) -> None:
        step.say(text)
        raise NodeError(text)

    return work


def test_what_a_server_says_is_short_and_plain(tmp_path: Path) -> None:
    """The reason of a status is the server's to choose: neither logs nor replies grow by it, nor do terminals obey."""
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
def test_a_long_word_makes_no_job(ask: Callable[[Updates, str], pb.Job], tmp_path: Path) -> None:
    """It would be in memory as long as the job waits, on disk after it, and in each reply."""
    found = updates(tmp_path)
    with pytest.raises(InvalidRequest, match="characters"):
        ask(found, "1" * 10_000_000)
    assert not found.get(pb.JobRequest()).jobs


def test_what_nobody_knows_makes_no_difference(tmp_path: Path) -> None:
    """Fields of no such number are not kept, nor do they make another job of the same."""
    found = updates(tmp_path)
    unknown = pb.UpdateGeoFilesRequest.FromString(b"\xfa\x7f\x80\x08" + b"x" * 1024)
    assert found.geo(unknown).id == found.geo(pb.UpdateGeoFilesRequest()).id


def test_a_clock_that_was_ahead_does_not_put_off_lists(tmp_path: Path) -> None:
    """Lists were looked for in a year that is yet to come, by a machine that knew no better at its start."""
    found = updates(tmp_path, lists_every=86_400.0)
    found._record.looked = 4e9
    found._look()
    assert [job.kind for job in found.get(pb.JobRequest()).jobs] == [GEO]


def test_a_node_that_ends_waits_for_what_is_not_broken_off(tmp_path: Path) -> None:
    """The work of a job sees that it is cancelled, and may put things back."""
    found, moment, done = jobs(tmp_path), Deferred[None](), list[str]()

    async def work(_: Step) -> None:
        try:
            await Deferred()
        finally:
            await moment
            done.append("put back")

    job = found.ask(NODE, "txnode", b"", work)
    closed = ensureDeferred(found.close())
    assert not closed.called
    moment.callback(None)
    assert closed.called and done == ["put back"] and job.state == "failed"
