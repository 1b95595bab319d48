"""Updates of nodes: asked for, and waited for to their end, also while a node becomes another version of itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from twisted.internet.task import deferLater

from node.client import NoReply
from node.nodectl.output import Row, note
from node.nodectl.running import Asked
from protos import service_pb2 as pb

COLUMNS = ("job", "update", "state", "before", "after", "what")
ENDED = ("done", "failed")
# Seconds between two questions, and for which a node may not answer.
LOOK, SILENCE = 0.5, 60.0


async def followed(node: Asked, ask: Callable[[], Awaitable[pb.Job]], wait: bool) -> pb.Job:
    """The job that is asked for, as it is at once or when it has ended; what it does meanwhile is said."""
    job, said, silent = await ask(), "", 0.0
    while wait and job.state not in ENDED:
        if (word := word_of(job)) != said:
            note(f"{node.name}: {word}")
            said = word
        await deferLater(node.reactor, LOOK)
        try:
            [job] = await node.client.jobs(job.id)
            silent = 0.0
        except NoReply:
            silent += LOOK
            if silent >= SILENCE:
                raise
    return job


def word_of(job: pb.Job) -> str:
    """What it does, and how far a download is, in tenths."""
    if job.state == "waiting":
        return "waits for another update"
    part = f" ({10 * (10 * job.fetched // job.total)} %)" if job.total and job.text.startswith("fetching") else ""
    return job.text + part


def rows(job: pb.Job) -> Iterator[Row]:
    lines = word_of(job).split("\n")
    yield job.id, job.subject, job.state, job.before, job.after, lines[0]
    for line in lines[1:]:
        yield "", "", "", "", "", line
