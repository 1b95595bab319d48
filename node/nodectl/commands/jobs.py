"""`nodectl jobs`, and the rows and progress of updates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import click
from twisted.internet.task import deferLater

from node.client import NoReply
from node.nodectl.fleet import Node
from node.nodectl.options import options
from node.nodectl.output import Row, note
from node.nodectl.session import Session
from protos import service_pb2 as pb

COLUMNS = ("job", "update", "state", "before", "after", "what")
# Seconds between two polls, and for how long a node may be silent.
LOOK, SILENCE = 0.5, 60.0


@click.command
@options
@click.argument("identity", metavar="[JOB]", required=False, default="")
def command(session: Session, identity: str) -> None:
    """Show the progress and results of each node's updates, the newest last, or of the update JOB alone."""
    outcomes = session.ask(lambda node: node.client.jobs(identity))
    session.report(outcomes, COLUMNS, lambda jobs: [row for job in jobs for row in rows(job)])


async def follow(node: Node, ask: Callable[[], Awaitable[pb.Job]], wait: bool) -> pb.Job:
    """Start a job by `ask`; with `wait`, poll it to its end and print its progress. Raises `NodeError`.

    The node may restart as another version meanwhile.
    """
    job, printed, silent = await ask(), "", 0.0
    while wait and job.state not in ("done", "failed"):
        if (word := _word_of(job)) != printed:
            note(f"{node.name}: {word}")
            printed = word
        await deferLater(node.reactor, LOOK)
        try:
            [job] = await node.client.jobs(job.id)
            silent = 0.0
        except NoReply:
            silent += LOOK
            if silent >= SILENCE:
                raise
    return job


def rows(job: pb.Job) -> Iterator[Row]:
    lines = _word_of(job).split("\n")
    yield job.id, job.subject, job.state, job.before, job.after, lines[0]
    for line in lines[1:]:
        yield "", "", "", "", "", line


def _word_of(job: pb.Job) -> str:
    """The current step of the job, with the progress of a download in steps of 10 %."""
    if job.state == "waiting":
        return "waits for another update"
    part = f" ({10 * (10 * job.fetched // job.total)} %)" if job.total and job.text.startswith("fetching") else ""
    return job.text + part
