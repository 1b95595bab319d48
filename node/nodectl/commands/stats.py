"""`nodectl stats`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from node.nodectl.live import watch
from node.nodectl.options import options
from node.nodectl.output import Row, amount
from node.nodectl.running import Node, Work
from node.nodectl.session import Session
from node.nodectl.traffic import KINDS, by_name, traffic
from protos import service_pb2 as pb

_FIGURES = ("system", "backend")


@click.command
@click.argument("kind", type=click.Choice([*KINDS, *_FIGURES]), default="users")
@click.option("--name", default="", help="Show only this user, inbound or outbound.")
@click.option("--reset", is_flag=True, help="Set the counters to zero: a panel will not see what is printed here.")
@click.option(
    "--watch",
    "every",
    type=click.FloatRange(0.2, 3600),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Repeat every SECONDS, with rates. [default: 2]",
)
@options
@click.pass_obj
def command(session: Session, kind: str, name: str, reset: bool, every: float | None) -> None:
    """Show bytes of users, inbounds or outbounds, or figures of the machine (system) or the core (backend)."""
    if kind in _FIGURES and (name or reset or every):
        raise click.UsageError(f"--name, --reset and --watch do not work with {kind}")
    if reset and every:
        raise click.UsageError("give --reset or --watch, not both")
    if kind in _FIGURES:
        figures: Work[pb.SystemStatsResponse | pb.BackendStatsResponse] = _system if kind == "system" else _backend
        session.report(session.ask(figures), ("figure", "value"), _figures)
    elif every:
        watch(session, kind, name, every)
    else:
        session.report(session.ask(traffic(kind, name, reset)), ("name", "uplink", "downlink"), _bytes)


async def _system(node: Node) -> pb.SystemStatsResponse:
    return await node.client.system_stats()


async def _backend(node: Node) -> pb.BackendStatsResponse:
    return await node.client.backend_stats()


def _figures(reply: pb.SystemStatsResponse | pb.BackendStatsResponse) -> Iterator[Row]:
    for field in reply.DESCRIPTOR.fields:
        yield field.name, getattr(reply, field.name)


def _bytes(reply: pb.StatResponse) -> Iterator[Row]:
    for name, count in sorted(by_name(reply.stats).items()):
        yield name, amount(count.uplink), amount(count.downlink)
