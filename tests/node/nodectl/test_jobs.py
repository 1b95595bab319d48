"""Updates that nodectl follows to their end."""

from __future__ import annotations

from typing import Any, cast

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from node.base.reactor import Reactor
from node.client import Client, NoReply, Unreachable
from node.nodectl.commands.update import LOOK, SILENCE, follow, rows
from node.nodectl.fleet import Node
from protos import service_pb2 as pb


class Updating:
    """A client of a node that updates: what it replies, one by one; the last reply is repeated."""

    def __init__(self, *replies: pb.Job | NoReply) -> None:
        self.replies = list(replies)

    async def first(self) -> pb.Job:
        [job] = await self.jobs("7")
        return job

    async def jobs(self, identity: str) -> list[pb.Job]:
        assert identity == "7"
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, NoReply):
            raise reply
        return [reply]


def job(state: str, text: str = "", **more: Any) -> pb.Job:
    return pb.Job(id="7", subject="core xray", state=state, text=text, **more)


def followed(client: Updating, wait: bool = True) -> tuple[Clock, Deferred[pb.Job]]:
    clock = Clock()
    node = Node("one", cast(Client, client), cast(Reactor, clock))
    return clock, Deferred.fromCoroutine(follow(node, client.first, wait))


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """Each step is printed once, over a restart of the node; the last state is the answer."""
    fetching = [job("running", "fetching the archive", fetched=part, total=100) for part in (5, 9, 55)]
    gone = [Unreachable("it restarts")] * 10
    clock, found = followed(Updating(job("waiting"), *fetching, *gone, job("running", "probing"), job("done", "fine")))
    clock.pump([LOOK] * 20)
    assert [cell for row in rows(cast(pb.Job, found.result)) for cell in row] == [
        "7",
        "core xray",
        "done",
        "",
        "",
        "fine",
    ]
    assert capsys.readouterr().err.splitlines() == [
        "one: waits for another update",
        "one: fetching the archive (0 %)",
        "one: fetching the archive (50 %)",
        "one: probing",
    ]


def test_a_node_that_stays_away() -> None:
    """Its silence is an error after `SILENCE` seconds."""
    clock, found = followed(Updating(job("running", "restarting"), Unreachable("gone")))
    clock.pump([LOOK] * int(SILENCE / LOOK - 1))
    assert not found.called
    clock.advance(LOOK)
    errors: list[Any] = []
    found.addErrback(errors.append)
    assert errors[0].check(Unreachable)


def test_without_waiting() -> None:
    """The job is the answer as it begins; a text of several lines has a row for each."""
    _, found = followed(Updating(job("failed", "no\nroom")), wait=False)
    assert [row[-1] for row in rows(cast(pb.Job, found.result))] == ["no", "room"]
