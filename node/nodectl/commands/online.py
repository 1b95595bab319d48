"""`nodectl online`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial

import click

from node.base.errors import UnknownName
from node.nodectl.fleet import Node, parallel
from node.nodectl.members import LISTING, listed
from node.nodectl.output import Row
from node.nodectl.session import Session, options
from protos import service_pb2 as pb

# Parallel calls to one node, one user each.
AT_ONCE = 64


@click.command
@click.argument("names", metavar="[NAME]...", nargs=-1)
@options
def online(session: Session, names: tuple[str, ...]) -> None:
    """Show from how many addresses each user is connected; for named users, the addresses and times.

    Without names, nodectl asks the node for each user: with tens of thousands this is slow.
    """
    if names:
        session.report(session.ask(lambda node: _addresses(node, names)), ("name", "address", "since"), _places)
    session.report(session.ask(_counts, LISTING), ("name", "addresses"), _rows)


async def _addresses(node: Node, names: Sequence[str]) -> list[pb.StatsOnlineIpListResponse]:
    return await parallel([partial(node.client.online_ips, name) for name in names], AT_ONCE)


async def _counts(node: Node) -> list[pb.OnlineStatResponse]:
    """The number of addresses of each connected user."""
    users = (await listed(node)).users
    found = await parallel([partial(_count, node, user.name) for user in users], AT_ONCE)
    return [count for count in found if count.value]


async def _count(node: Node, name: str) -> pb.OnlineStatResponse:
    try:
        return await node.client.online(name)
    except UnknownName:  # removed meanwhile
        return pb.OnlineStatResponse(name=name)


def _places(users: Sequence[pb.StatsOnlineIpListResponse]) -> Iterator[Row]:
    for user in users:
        for address, since in sorted(user.ips.items()):
            yield user.name, address, datetime.fromtimestamp(since).astimezone().isoformat(" ")


def _rows(counts: Sequence[pb.OnlineStatResponse]) -> Iterator[Row]:
    for count in sorted(counts, key=lambda count: (-count.value, count.name)):
        yield count.name, count.value
