"""The stage of a job, from the lines of the programs that it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred

from node.updates.jobs import Stage, Step
from node.updates.tool import Tool
from protos import service_pb2 as pb


def test_an_upgrade_waits_from_the_test_on() -> None:
    """A download may be cancelled; the test of a core may not, and a second download may again."""
    heard: list[Callable[[list[str]], None]] = []
    done: Deferred[Any] = Deferred()

    async def run(*words: Any) -> Any:
        heard.append(words[-1])
        return await done

    jobs = SimpleNamespace(report=lambda job: None, stage=Stage.CHANGING)
    tool = Tool(run, {})
    brought = ensureDeferred(tool.bring(Step(pb.Job(), cast(Any, jobs)), "lists", Path("/into")))
    seen = [jobs.stage]
    for line in ("fetching http://one", "fetched 1 of 2 bytes", "verified", "fetching http://two", "", "trying it"):
        heard[0]([line])
        seen.append(jobs.stage)
    fetching, changing = Stage.FETCHING, Stage.CHANGING
    assert seen == [fetching, fetching, fetching, changing, fetching, fetching, changing]
    done.callback(SimpleNamespace(code=0, lines=[], output=b"/there\n"))
    found: list[Path] = []
    brought.addCallback(found.append)
    assert found == [Path("/there")] and jobs.stage is changing
