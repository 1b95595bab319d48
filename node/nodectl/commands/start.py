"""`nodectl start`, `stop` and `info`; and which core a configuration is for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from node.base.errors import UnknownPath
from node.nodectl import users_file
from node.nodectl.fleet import Node
from node.nodectl.members import note_refused, refusals, unconfirmed
from node.nodectl.output import Exit, Row, Unusable
from node.nodectl.session import Session, options
from protos import service_pb2 as pb

# By the names on the command line.
CORES = {"xray": pb.XRAY, "sing-box": pb.SING_BOX}
# The core that reads geoip.dat and geosite.dat.
WITH_GEO = "xray"
# The key that names the protocol in inbounds and outbounds of each core.
_KEYS = {"protocol": pb.XRAY, "type": pb.SING_BOX}
# Seconds: a core with many users starts slowly; before it stops, the node closes connections and reads counters.
STARTING, STOPPING = 120.0, 30.0
COLUMNS = ("state", "core", "version", "node", "remarks")


@click.command
@options
def info(session: Session) -> None:
    """Show the state, core, versions and warnings of each node."""
    session.report(session.ask(lambda node: node.client.info()), COLUMNS, rows)


def rows(info: pb.BaseInfoResponse) -> Iterator[Row]:
    """One row for the node, and one for each remark after the first."""
    remarks = [*filter(None, [info.reason]), *info.warnings]
    yield info.state, info.core_type, info.core_version, info.version, remarks[0] if remarks else ""
    for remark in remarks[1:]:
        yield "", "", "", "", remark


@click.command
@click.argument("config", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--users",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read the users to let in from this file. [default: no users]",
)
@click.option("--core", type=click.Choice(list(CORES)), help="The core that CONFIG is for. [default: detect it]")
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
def start(
    session: Session, config: Path, users: Path | None, core: str | None, keep_alive: int, exclude: tuple[str, ...]
) -> None:
    """Start the core with CONFIG (a file, or - for standard input) and users.

    If the core already runs with the same configuration, only its users are replaced.
    """
    text = _read(config)
    backend = pb.Backend(
        type=CORES[core] if core else detect(text),
        config=text,
        users=users_file.read(users) if users else [],
        keep_alive=keep_alive,
        exclude_inbounds=exclude,
    )
    outcomes = session.ask(partial(_start, backend), STARTING)
    note_refused(outcomes)
    refused = Exit.USERS_REFUSED
    session.report(outcomes, COLUMNS, lambda answer: rows(answer["info"]), refused, lambda each: bool(each["refused"]))


async def _start(backend: pb.Backend, node: Node) -> dict[str, Any]:
    info = await node.client.start(backend)
    refused: dict[str, str] = {}
    with suppress(UnknownPath):  # an older node has no ListUsers
        refused = await unconfirmed(node, [user for user in backend.users if user.inbounds])
    return {"info": info, "refused": refusals(refused)}


@click.command
@options
def stop(session: Session) -> None:
    """Stop the core. The node reads its traffic counters first."""
    session.report(session.ask(_stop, STOPPING), COLUMNS, rows)


async def _stop(node: Node) -> pb.BaseInfoResponse:
    await node.client.stop()
    return await node.client.info()


def _read(path: Path) -> str:
    """Read a configuration from a file, or for - from standard input. Raises `Unusable`."""
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"{path} cannot be read: {error}")


def detect(config: str) -> pb.BackendType:
    """The core that a configuration is for. Raises `Unusable` where it is not certain."""
    try:
        document = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise Unusable(
            f"cannot detect which core the configuration is for, as it is not plain JSON ({error}): give --core"
        )
    found = {core for key, core in _KEYS.items() if any(key in part for part in _parts(document))}
    if len(found) != 1:
        raise Unusable(f"cannot detect which core the configuration is for: give --core {' or --core '.join(CORES)}")
    return found.pop()


def _parts(document: Any) -> list[dict[str, Any]]:
    """The inbounds and outbounds of a configuration."""
    lists = [document.get(name) for name in ("inbounds", "outbounds")] if isinstance(document, dict) else []
    return [part for found in lists if isinstance(found, list) for part in found if isinstance(part, dict)]
