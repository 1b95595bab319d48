"""`nodectl stop`."""

from __future__ import annotations

import click

from node.nodectl.commands.info import COLUMNS, rows
from node.nodectl.fleet import Node
from node.nodectl.options import options
from node.nodectl.session import Session
from protos import service_pb2 as pb

# Seconds: the node first closes connections and reads counters.
TIMEOUT = 30.0


@click.command
@options
def command(session: Session) -> None:
    """Stop the core. The node reads its traffic counters first."""
    session.report(session.ask(_stop, TIMEOUT), COLUMNS, rows)


async def _stop(node: Node) -> pb.BaseInfoResponse:
    await node.client.stop()
    return await node.client.info()
