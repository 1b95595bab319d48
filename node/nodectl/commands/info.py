"""`nodectl info`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from node.nodectl.options import options
from node.nodectl.output import Row
from node.nodectl.session import Session
from protos import service_pb2 as pb

COLUMNS = ("state", "core", "version", "node", "remarks")


@click.command
@options
def command(session: Session) -> None:
    """Show the state, core, versions and warnings of each node."""
    session.report(session.ask(lambda node: node.client.info()), COLUMNS, rows)


def rows(info: pb.BaseInfoResponse) -> Iterator[Row]:
    """One row for the node, and one for each remark after the first."""
    remarks = [*filter(None, [info.reason]), *info.warnings]
    yield info.state, info.core_type, info.core_version, info.version, remarks[0] if remarks else ""
    for remark in remarks[1:]:
        yield "", "", "", "", remark
