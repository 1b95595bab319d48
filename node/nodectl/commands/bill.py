"""`nodectl bill`: what the core has counted beside what the machine's interfaces have carried."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import click

from node.limits.periods import known_zone
from node.nodectl.fleet import answers
from node.nodectl.output import Row, amount, note
from node.nodectl.session import Session, options
from protos import service_pb2 as pb

COLUMNS = ("bytes", "received", "sent", "both")
# Bytes that the kernel counts for each byte of users if the network card divides and joins all packets.
ONCE = 2.0


@click.command
@click.option("--since", metavar="DATE", default="", help="The first day, YYYY-MM-DD, in the node's time zone.")
@click.option("--month", is_flag=True, help="Since the month of NODE_QUOTA began. [default]")
@options
def bill(session: Session, since: str, month: bool) -> None:
    """Show bytes of users beside those that the machine carried, and explain the difference (docs/bill.md)."""
    if since and month:
        raise click.UsageError("give --since or --month, not both")

    outcomes = session.ask(lambda node: node.client.bill(since))
    for name, reply in answers(outcomes) if not session.json else ():
        for text in _notes(reply):
            note(f"{name}: {text}")
    session.report(outcomes, COLUMNS, _rows)


def _notes(reply: pb.Bill) -> Iterator[str]:
    """The time, the ratio, and what is not explained."""
    zone = known_zone(reply.timezone)
    since, until = (f"{datetime.fromtimestamp(at, zone):%Y-%m-%d %H:%M}" for at in (reply.since, reply.until))
    yield f"from {since} to {until} ({reply.timezone})"
    if reply.ratio:
        used = ", ".join(reply.transports) or "any transport"
        band = f"{reply.least:.2f} (large transfers) to {reply.most:.2f} (small requests) on the network by {used}"
        yield f"{reply.ratio:.2f} bytes carried for each byte of users; {band}, from {ONCE:.2f} as the kernel counts"
    yield from (f"WARNING: {text}" for text in reply.warnings)


def _rows(reply: pb.Bill) -> Iterator[Row]:
    for name, count in (
        ("users", reply.users),
        ("inbounds", reply.inbounds),
        ("outbounds", reply.outbounds),
        (f"interfaces ({', '.join(reply.names)})", reply.interfaces),
        ("- controllers", reply.controllers),
    ):
        yield name, amount(count.received), amount(count.sent), amount(count.received + count.sent)
    for name, both in (
        ("- in and out of the core", reply.core),
        ("- headers, TLS", reply.headers),
        ("- other programs", reply.others),
        ("counted, not carried", reply.missing),
    ):
        if both or name.startswith("- "):
            yield name, "", "", amount(both)
