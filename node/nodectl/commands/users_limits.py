"""`nodectl users limits` and `limit`: show and set the limits of users."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from node.limits import parsing
from node.nodectl.exits import Unusable
from node.nodectl.fleet import Node
from node.nodectl.options import options
from node.nodectl.output import Row, rate_of_bits, size
from node.nodectl.session import Session
from protos import service_pb2 as pb

COLUMNS = ("name", "state", "used", "of", "resets", "expires", "addresses", "down", "up", "notes")
# Seconds: a hundred thousand users are a hundred pages.
TIMEOUT = 60.0


@click.command
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--off", is_flag=True, help="Show only users who are barred by a limit.")
@options
def limits(session: Session, names: tuple[str, ...], off: bool) -> None:
    """Show the limits of users, what they have used, and who is barred."""

    async def ask(node: Node) -> list[pb.LimitState]:
        return [user async for page in node.client.all_limits(names, off) for user in page.users]

    session.report(session.ask(ask, TIMEOUT), COLUMNS, lambda users: map(cells, users))


@click.command
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--to", "words", metavar="LIMITS", help=f'The limits, for example "{parsing.WORDS}".')
@click.option(
    "--clear",
    is_flag=True,
    help="Remove limits set here; those from the panel and the node's settings apply again.",
)
@options
def limit(session: Session, names: tuple[str, ...], words: str | None, clear: bool) -> None:
    """Set the limits of users. Limits that are not given come from the node's settings; 0 means no limit.

    This replaces the user's earlier limits. If a panel later changes the limits of a user, the panel's apply.
    """
    if clear == (words is not None):
        raise Unusable('give --to "LIMITS" or --clear')
    try:
        limits = parsing.limits(words) if words is not None else None
    except ValueError as error:
        raise Unusable(str(error)) from error
    outcomes = session.ask(lambda node: node.client.set_limits(dict.fromkeys(names, limits)))
    session.report(outcomes, ("name", "note"), lambda reply: [(note.name, note.text) for note in reply.notes])


COMMANDS = (limits, limit)


def cells(user: pb.LimitState) -> Row:
    """A row with the cells of `COLUMNS`."""
    limits, quota = user.limits, user.limits.bytes
    allowed = f"{len(user.addresses)}/{limits.addresses}" if limits.addresses else ""
    return (
        user.name,
        f"off: {', '.join(user.off_for)}" if user.off_for else "on",
        size(quota.bytes - user.left) if user.left else size(_used(user)) if quota.bytes else "",
        size(quota.bytes) if quota.bytes else "",
        _day(user.resets_at),
        _day(limits.expires_at),
        allowed,
        rate_of_bits(limits.speed.down),
        rate_of_bits(limits.speed.up),
        "; ".join(user.notes),
    )


def _used(user: pb.LimitState) -> int:
    """Bytes used where none are left: in the direction that counts, with those used on other nodes."""
    quota = user.limits.bytes
    ways = {pb.Quota.UP: user.used_up, pb.Quota.DOWN: user.used_down}
    return max(quota.bytes, ways.get(quota.way, user.used_up + user.used_down))


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M") if seconds else ""
