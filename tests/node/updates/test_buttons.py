"""The buttons of a deployed panel: what each asks for, and what the panel gets while a job runs, ends or goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock

from drivers.install.releases import CORES, newest
from node.api.pages import Answer
from node.base.errors import Forbidden
from node.base.logs import LogRing
from node.events.journal import Journal
from node.updates.buttons import RESET, UPDATED, Buttons
from node.updates.jobs import DONE, FAILED, RUNNING, WAITING, Jobs, Stage
from node.updates.policy import LISTS_URL, REGIONS, Policy
from node.updates.updates import Updates
from protos.service_pb2 import Job

PATHS = ("/node/update", "/node/core_update", "/node/geofiles", "/node/hard_reset")
SENT = {"core_version": "v26.7.28", "region": "iran"}


class Asked:
    """The updates, with one job for whatever is asked."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.job = Job(id="7", subject="it", state=RUNNING, text="fetching")
        self.asked: list[object] = []
        self.refusal: Exception | None = None

    def _ask(self, *words: object) -> Job:
        if self.refusal:
            raise self.refusal
        self.asked = [*words]
        return self.job

    def newest_node(self) -> Job:
        return self._ask("node")

    def newest_core(self, version: str) -> Job:
        return self._ask("core", version)

    def geo(self, _: object, region: str) -> Job:
        return self._ask("geo", region)

    def reset(self) -> Job:
        return self._ask("reset")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def updates(clock: Clock, tmp_path: Path) -> Asked:
    reactor = cast(Any, clock)
    return Asked(Jobs(reactor, tmp_path / "jobs", LogRing(reactor, 10), cast(Journal, None)))


def pressed(clock: Clock, updates: Asked, path: str, sent: object = SENT) -> Deferred[tuple[int, str]]:
    buttons = Buttons(clock, cast(Updates, updates))
    [button] = [each for each in buttons.all() if each.path == path]
    body = b"" if sent is None else json.dumps(sent).encode()
    pressing: Deferred[Answer] = ensureDeferred(cast(Any, button.press(body)))
    return pressing.addCallback(lambda answer: (answer.status, json.loads(answer.body)["detail"]))


def result(answer: Deferred[tuple[int, str]]) -> tuple[int, str]:
    assert answer.called
    found: list[tuple[int, str]] = []
    answer.addCallback(found.append)
    return found[0]


@pytest.mark.parametrize(("state", "status"), [(DONE, 200), (FAILED, 500)])
@pytest.mark.parametrize("path", PATHS)
def test_a_job_that_ends(clock: Clock, updates: Asked, path: str, state: str, status: int) -> None:
    answer = pressed(clock, updates, path)
    assert not answer.called
    updates.job.state, updates.job.text = state, "so it ended"
    updates.jobs.release(updates.job)
    assert result(answer) == (status, "so it ended")


@pytest.mark.parametrize("path", PATHS)
def test_a_job_that_takes_longer_than_the_panel_waits(clock: Clock, updates: Asked, path: str) -> None:
    answer = pressed(clock, updates, path)
    clock.advance((RESET if path.endswith("reset") else UPDATED) - 1)
    assert not answer.called
    clock.advance(1)
    assert result(answer) == (202, "fetching; the job 7 goes on")


def test_the_result_is_on_disk(clock: Clock, updates: Asked) -> None:
    """A caller who gets it may kill the node at once."""
    writing = updates.jobs._writing
    assert writing.acquire().called
    answer = pressed(clock, updates, PATHS[0])
    updates.job.state = DONE
    updates.jobs.release(updates.job)
    assert not answer.called
    writing.release()
    assert result(answer)[0] == 200


def test_callers_that_hang_up(clock: Clock, updates: Asked) -> None:
    """The node forgets them at once, and answers the others."""
    answer = pressed(clock, updates, PATHS[0])
    for path in PATHS:
        gone = pressed(clock, updates, path).addErrback(lambda failure: failure.trap(CancelledError))
        gone.cancel()
    assert len(updates.jobs._waiting) == 1
    updates.job.state = DONE
    updates.jobs.release(updates.job)
    assert result(answer)[0] == 200


def test_another_job_ends(clock: Clock, updates: Asked) -> None:
    answer = pressed(clock, updates, PATHS[0])
    updates.jobs.release(Job(id="8"))
    assert not answer.called


def test_the_next_process_takes_over(clock: Clock, updates: Asked) -> None:
    """All who wait get an answer from the process that ends."""
    answers = [pressed(clock, updates, path) for path in PATHS]
    updates.jobs.stage = Stage.BECOMING
    updates.jobs.release()
    assert {result(answer)[0] for answer in answers} == {200}


@pytest.mark.parametrize(("state", "stage"), [(RUNNING, Stage.FETCHING), (WAITING, Stage.BECOMING)])
def test_the_next_process_does_not_go_on_with_a_job(clock: Clock, updates: Asked, state: str, stage: Stage) -> None:
    """It fails the job: no success for the panel to show."""
    updates.job.state, updates.jobs.stage = state, stage
    answer = pressed(clock, updates, PATHS[1])
    updates.jobs.release()
    assert result(answer) == (503, "the node is being upgraded: ask again")


@pytest.mark.parametrize(
    ("path", "sent", "asked"),
    [
        (PATHS[0], None, ["node"]),
        (PATHS[1], {"core_version": "latest"}, ["core", ""]),
        (PATHS[1], {"core_version": "v26.7.28"}, ["core", "26.7.28"]),
        (PATHS[1], {"core_version": "26.7.28"}, ["core", "26.7.28"]),
        (PATHS[2], {"region": "russia"}, ["geo", "russia"]),
        (PATHS[3], None, ["reset"]),
    ],
)
def test_what_is_asked_for(clock: Clock, updates: Asked, path: str, sent: object, asked: list[object]) -> None:
    pressed(clock, updates, path, sent)
    assert updates.asked == asked


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (PATHS[1], {}),
        (PATHS[1], {"core_version": "26.7"}),
        (PATHS[1], {"core_version": "../26.7.28"}),
        (PATHS[1], {"core_version": None}),
        (PATHS[2], {"region": "mars"}),
        (PATHS[2], {"region": ["iran"]}),
        (PATHS[2], ["iran"]),
        (PATHS[0], 7),
    ],
)
def test_bad_requests(clock: Clock, updates: Asked, path: str, sent: object) -> None:
    """Nothing begins, and the panel shows why."""
    assert result(pressed(clock, updates, path, sent))[0] == 400
    assert updates.asked == []


def test_what_may_not_be(clock: Clock, updates: Asked) -> None:
    updates.refusal = Forbidden("UPDATES=on allows it")
    assert result(pressed(clock, updates, PATHS[0])) == (403, "UPDATES=on allows it")


def test_regions() -> None:
    """Each has a server of its own, unless the operator has set one."""
    usual, own = Policy(), Policy(lists_url="https://mirror.test/geo")
    assert [usual.lists_of(region) for region in REGIONS] == list(REGIONS.values())
    assert usual.lists_of("china") == LISTS_URL
    assert {own.lists_of(region) for region in REGIONS} == {"https://mirror.test/geo"}


@pytest.mark.parametrize("name", CORES)
def test_the_newest_release(name: str) -> None:
    versions = [tuple(map(int, core.version.split("."))) for core in CORES[name] if core.archives]
    assert newest(name) == ".".join(map(str, max(versions)))
