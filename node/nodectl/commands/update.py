"""`nodectl update`: other releases of cores, geo files and the node itself, brought in while it serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn

import click

from node.client import Client
from node.nodectl.exits import Exit
from node.nodectl.kinds import CORES
from node.nodectl.options import options
from node.nodectl.running import Asked
from node.nodectl.session import Session
from node.nodectl.waiting import COLUMNS, followed, rows
from protos import service_pb2 as pb

# Seconds that each question may take.
TIMEOUT = 15.0

_WAIT = click.option("--no-wait", is_flag=True, help="Return at once: `nodectl jobs` tells what becomes of it.")
_DIGEST = click.option("--sha256", default="", metavar="DIGEST", help="What is fetched must have this SHA-256.")
_BACK = click.option("--back", is_flag=True, help="Instead: what there was before the last update.")


@click.group
def command() -> None:
    """Bring other versions to nodes that serve: what does not hold is taken back, and nobody is dropped."""


@command.command
@options
@click.argument("name", metavar="CORE", type=click.Choice([*CORES]))
@click.argument("version", required=False, default="")
@_DIGEST
@_BACK
@_WAIT
@click.pass_obj
def core(session: Session, name: str, version: str, sha256: str, back: bool, no_wait: bool) -> None:
    """Another release of a core; the digest of its archive is needed where the node knows none of it."""
    if back == bool(version):
        raise click.UsageError("say a VERSION, or --back")
    _update(session, lambda client: client.update_core(CORES[name], version, sha256, back), no_wait)


@command.command
@options
@click.argument("files", metavar="[NAME[=SHA256]]...", nargs=-1)
@_BACK
@_WAIT
@click.pass_obj
def geo(session: Session, files: tuple[str, ...], back: bool, no_wait: bool) -> None:
    """The newest geo files, or these of them."""
    named = {name: digest for name, _, digest in (word.partition("=") for word in files)}
    _update(session, lambda client: client.update_geo_files(named, back), no_wait)


@command.command
@options
@click.argument("version", required=False, default="")
@_DIGEST
@_WAIT
@click.pass_obj
def node(session: Session, version: str, sha256: str, no_wait: bool) -> None:
    """The node itself: this version's wheel, or what is installed there by now."""
    if version and not sha256:
        raise click.UsageError("--sha256 names the digest of the version's wheel")
    _update(session, lambda client: client.update_node(version, sha256), no_wait)


def _update(session: Session, ask: Callable[[Client], Awaitable[pb.Job]], no_wait: bool) -> NoReturn:
    async def work(asked: Asked) -> pb.Job:
        return await followed(asked, partial(ask, asked.client), wait=not no_wait)

    outcomes = session.ask(work, TIMEOUT)
    failed = any(outcome.answer is not None and outcome.answer.state == "failed" for outcome in outcomes)
    session.report(outcomes, COLUMNS, rows, Exit.FAILED if failed else Exit.OK)
