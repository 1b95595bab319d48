"""`nodectl users`: list users, show and set their limits; the other subcommands are in `users_*`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from node.limits import parsing
from node.nodectl.commands import users_change, users_sync
from node.nodectl.fleet import Node, answers
from node.nodectl.members import COLUMNS, LISTING, WIDE, cells, listed, settled
from node.nodectl.output import Row, Unusable, note, rate_of_bits, size
from node.nodectl.session import Session, options
from protos import service_pb2 as pb

_LIMITS = ("name", "state", "used", "of", "resets", "expires", "addresses", "down", "up", "notes")


@click.group
def users() -> None:
    """Manage the users of nodes: list, add, change, remove, limits, limit, diff, sync."""


@users.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--wide", is_flag=True, help="Show more columns, and the kinds of credentials (not the secrets).")
@click.option(
    "--unconfirmed", is_flag=True, help="Show only users whom the core has not confirmed in all inbounds, and why."
)
@click.option("--credentials", is_flag=True, help="With --json: include credentials; needs a key of scope all.")
@options
def list_users(session: Session, names: tuple[str, ...], wide: bool, unconfirmed: bool, credentials: bool) -> None:
    """List the users of nodes, their inbounds, and what the core has confirmed."""
    if credentials and not session.json:
        raise click.UsageError("--credentials needs --json: secrets are not shown on a screen")

    async def ask(node: Node) -> dict[str, Any]:
        found = await listed(node, names, credentials)
        if unconfirmed:
            found.users = [row for row in found.users if not settled(row)]
        return vars(found)

    outcomes = session.ask(ask, LISTING)
    for name, answer in answers(outcomes):
        if answer["changed"]:
            note(f"{name}: users changed during the listing: it may mix old and new states; list them again")
    columns = COLUMNS + WIDE if wide else COLUMNS
    session.report(outcomes, columns, lambda answer: [cells(row, wide) for row in answer["users"]])


@users.command
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--off", is_flag=True, help="Show only users who are barred by a limit.")
@options
def limits(session: Session, names: tuple[str, ...], off: bool) -> None:
    """Show the limits of users, what they have used, and who is barred."""

    async def ask(node: Node) -> list[pb.LimitState]:
        return [user async for page in node.client.all_limits(names, off) for user in page.users]

    session.report(session.ask(ask, LISTING), _LIMITS, lambda users: map(_limits_of, users))


@users.command
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


def _limits_of(user: pb.LimitState) -> Row:
    """A row with the cells of `_LIMITS`."""
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


for part in (*users_change.COMMANDS, *users_sync.COMMANDS):
    users.add_command(part)
