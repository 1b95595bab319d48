"""`nodectl start`."""

from __future__ import annotations

from pathlib import Path

import click

from node.nodectl import kinds, userfile
from node.nodectl.commands.info import COLUMNS, rows
from node.nodectl.options import options
from node.nodectl.running import Asked
from node.nodectl.session import Session
from protos import service_pb2 as pb

# Seconds: a core that is to come up with many users takes its time.
TIMEOUT = 120.0


@click.command
@click.argument("config", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--users", type=click.Path(path_type=Path), metavar="FILE", help="Who may use it; without it nobody.")
@click.option("--core", type=click.Choice(list(kinds.CORES)), help="Which core it is for, if that is not plain.")
@click.option("--keep-alive", type=click.IntRange(0), default=0, metavar="SECONDS", help="Stop it when no one asks.")
@click.option("--exclude", multiple=True, metavar="TAG", help="Leave the users of this inbound as they are in CONFIG.")
@options
@click.pass_obj
def command(
    session: Session, config: Path, users: Path | None, core: str | None, keep_alive: int, exclude: tuple[str, ...]
) -> None:
    """Run CONFIG (a file, or - for standard input) with these users.

    What runs already with the same configuration only gets the users.
    """
    text = kinds.read(config)
    backend = pb.Backend(
        type=kinds.CORES[core] if core else kinds.recognised(text),
        config=text,
        users=userfile.read(users) if users else [],
        keep_alive=keep_alive,
        exclude_inbounds=exclude,
    )

    async def start(node: Asked) -> pb.BaseInfoResponse:
        return await node.client.start(backend)

    session.report(session.ask(start, TIMEOUT), COLUMNS, rows)
