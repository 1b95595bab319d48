"""`nodectl update` and `jobs`: update cores, geo files or the node itself while it serves, and show the progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import NoReturn

import click
from twisted.internet.task import deferLater

from node.client import Client, NoReply
from node.nodectl.commands.start import CORES
from node.nodectl.fleet import Node
from node.nodectl.output import Exit, Row, note
from node.nodectl.session import Session, options
from protos import service_pb2 as pb

COLUMNS = ("job", "update", "state", "before", "after", "what")
# Seconds between two polls, and for how long a node may be silent.
LOOK, SILENCE = 0.5, 60.0


@click.command
@options
@click.argument("identity", metavar="[JOB]", required=False, default="")
def jobs(session: Session, identity: str) -> None:
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
    """What the job does now, with the progress of a download in steps of 10 %."""
    if job.state == "waiting":
        return "waits for another update"
    part = f" ({10 * (10 * job.fetched // job.total)} %)" if job.total and job.text.startswith("fetching") else ""
    return job.text + part


_WAIT = click.option("--no-wait", is_flag=True, help="Return at once; `nodectl jobs` shows the progress.")
_DIGEST = click.option("--sha256", default="", metavar="DIGEST", help="Refuse a download with another SHA-256.")
_BACK = click.option("--back", is_flag=True, help="Go back to the version before the last update.")


@click.group
def update() -> None:
    """Update running nodes. TCP connections stay open; a version that fails is rolled back."""


@update.command
@options
@click.argument("name", metavar="CORE", type=click.Choice([*CORES]))
@click.argument("version", required=False, default="")
@_DIGEST
@_BACK
@_WAIT
def core(session: Session, name: str, version: str, sha256: str, back: bool, no_wait: bool) -> None:
    """Update a core to VERSION. --sha256 is required for a release whose digest the node does not know."""
    if back == bool(version):
        raise click.UsageError("give either a VERSION or --back")
    _update(session, lambda client: client.update_core(CORES[name], version, sha256, back), no_wait)


@update.command
@options
@click.argument("files", metavar="[NAME[=SHA256]]...", nargs=-1)
@_BACK
@_WAIT
def geo(session: Session, files: tuple[str, ...], back: bool, no_wait: bool) -> None:
    """Update geo files to the newest ones. [default: geoip.dat and geosite.dat]"""
    named = {name: digest for name, _, digest in (word.partition("=") for word in files)}
    _update(session, lambda client: client.update_geo_files(named, back), no_wait)


@update.command
@options
@click.argument("version", required=False, default="")
@_DIGEST
@_WAIT
def node(session: Session, version: str, sha256: str, no_wait: bool) -> None:
    """Update the node: have VERSION installed, or "latest", or without VERSION switch to the version installed on disk.

    The machine needs the service that installs versions (scripts/install --updates), which verifies the signature.
    """
    _update(session, lambda client: client.update_node(version, sha256), no_wait)


def _update(session: Session, ask: Callable[[Client], Awaitable[pb.Job]], no_wait: bool) -> NoReturn:
    outcomes = session.ask(lambda asked: follow(asked, partial(ask, asked.client), wait=not no_wait))
    session.report(outcomes, COLUMNS, rows, Exit.FAILED, lambda job: job.state == "failed")
