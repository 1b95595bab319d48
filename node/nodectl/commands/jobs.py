"""`nodectl jobs`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from node.nodectl.follow_job import COLUMNS, rows
from node.nodectl.options import options
from node.nodectl.output import Row
from node.nodectl.running import Node
from node.nodectl.session import Session
from protos import service_pb2 as pb


@click.command
@options
@click.argument("identity", metavar="[JOB]", required=False, default="")
@click.pass_obj
def command(session: Session, identity: str) -> None:
    """Show the progress and results of each node's updates, the newest last, or of the update JOB alone."""

    async def work(node: Node) -> list[pb.Job]:
        return await node.client.jobs(identity)

    session.report(session.ask(work), COLUMNS, _rows)


def _rows(jobs: list[pb.Job]) -> Iterator[Row]:
    for job in jobs:
        yield from rows(job)
