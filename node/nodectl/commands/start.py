"""`nodectl start`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from node.base.errors import UnknownPath
from node.nodectl import detect_core, userfile
from node.nodectl.commands.info import COLUMNS, rows
from node.nodectl.exits import Exit
from node.nodectl.fleet import Node, answers
from node.nodectl.members import listed, note_refused
from node.nodectl.options import options
from node.nodectl.session import Session
from node.nodectl.users.rows import not_in
from protos import service_pb2 as pb

# Seconds: a core with many users starts slowly.
TIMEOUT = 120.0


@click.command
@click.argument("config", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--users",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read the users to let in from this file. [default: no users]",
)
@click.option(
    "--core", type=click.Choice(list(detect_core.CORES)), help="The core that CONFIG is for. [default: detect it]"
)
@click.option(
    "--keep-alive",
    type=click.IntRange(0),
    default=0,
    metavar="SECONDS",
    help="Stop the core when no controller has called for this long. [default: never]",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="TAG",
    help="Keep the users that CONFIG has in this inbound; may be repeated.",
)
@options
def command(
    session: Session, config: Path, users: Path | None, core: str | None, keep_alive: int, exclude: tuple[str, ...]
) -> None:
    """Start the core with CONFIG (a file, or - for standard input) and users.

    If the core already runs with the same configuration, only its users are replaced.
    """
    text = detect_core.read(config)
    backend = pb.Backend(
        type=detect_core.CORES[core] if core else detect_core.detect(text),
        config=text,
        users=userfile.read(users) if users else [],
        keep_alive=keep_alive,
        exclude_inbounds=exclude,
    )

    outcomes = session.ask(partial(_start, backend), TIMEOUT)
    refused = {node: answer["refused"] for node, answer in answers(outcomes)}
    for node, missing in refused.items():
        note_refused(node, missing)
    code = Exit.USERS_REFUSED if any(refused.values()) else Exit.OK
    session.report(outcomes, COLUMNS, lambda answer: rows(answer["info"]), code)


async def _start(backend: pb.Backend, node: Node) -> dict[str, Any]:
    info = await node.client.start(backend)
    with suppress(UnknownPath):  # an older node has no ListUsers
        wanted = [user for user in backend.users if user.inbounds]
        found = (await listed(node, [user.email for user in wanted])).users if wanted else []
        return {"info": info, "refused": [{"name": name, "why": why} for name, why in not_in(wanted, found)]}
    return {"info": info, "refused": []}
