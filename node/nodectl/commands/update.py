"""`nodectl update`: update cores, geo files or the node itself while it serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn

import click

from node.client import Client
from node.nodectl.commands.jobs import COLUMNS, follow, rows
from node.nodectl.detect_core import CORES
from node.nodectl.exits import Exit
from node.nodectl.options import options
from node.nodectl.session import Session
from protos import service_pb2 as pb

# Seconds for each call.
TIMEOUT = 15.0

_WAIT = click.option("--no-wait", is_flag=True, help="Return at once; `nodectl jobs` shows the progress.")
_DIGEST = click.option("--sha256", default="", metavar="DIGEST", help="Refuse a download with another SHA-256.")
_BACK = click.option("--back", is_flag=True, help="Go back to the version before the last update.")


@click.group
def command() -> None:
    """Update running nodes. TCP connections stay open; a version that fails is rolled back."""


@command.command
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


@command.command
@options
@click.argument("files", metavar="[NAME[=SHA256]]...", nargs=-1)
@_BACK
@_WAIT
def geo(session: Session, files: tuple[str, ...], back: bool, no_wait: bool) -> None:
    """Update geo files to the newest ones. [default: geoip.dat and geosite.dat]"""
    named = {name: digest for name, _, digest in (word.partition("=") for word in files)}
    _update(session, lambda client: client.update_geo_files(named, back), no_wait)


@command.command
@options
@click.argument("version", required=False, default="")
@_DIGEST
@_WAIT
def node(session: Session, version: str, sha256: str, no_wait: bool) -> None:
    """Update the node: install the wheel of VERSION, or without VERSION switch to the version installed on disk."""
    if version and not sha256:
        raise click.UsageError(f"version {version} needs --sha256, the digest of its wheel")
    _update(session, lambda client: client.update_node(version, sha256), no_wait)


def _update(session: Session, ask: Callable[[Client], Awaitable[pb.Job]], no_wait: bool) -> NoReturn:
    outcomes = session.ask(lambda asked: follow(asked, partial(ask, asked.client), wait=not no_wait), TIMEOUT)
    failed = any(outcome.answer is not None and outcome.answer.state == "failed" for outcome in outcomes)
    session.report(outcomes, COLUMNS, rows, Exit.FAILED if failed else Exit.OK)
