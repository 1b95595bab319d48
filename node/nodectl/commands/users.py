"""`nodectl users`: list users; the other subcommands are in `users_*`."""

from __future__ import annotations

from typing import Any

import click

from node.nodectl.commands import users_change, users_limits, users_sync
from node.nodectl.fleet import Node, answers
from node.nodectl.members import listed
from node.nodectl.options import options
from node.nodectl.output import note
from node.nodectl.session import Session
from node.nodectl.users.rows import COLUMNS, WIDE, cells, settled

# Seconds: a hundred thousand users are a hundred pages.
TIMEOUT = 60.0


@click.group
def command() -> None:
    """Manage the users of nodes: list, add, change, remove, limits, limit, diff, sync."""


@command.command("list")
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

    outcomes = session.ask(ask, TIMEOUT)
    for name, answer in answers(outcomes):
        if answer["changed"]:
            note(f"{name}: users changed during the listing: it may mix old and new states; list them again")
    columns = COLUMNS + WIDE if wide else COLUMNS
    session.report(outcomes, columns, lambda answer: [cells(row, wide) for row in answer["users"]])


for part in (*users_change.COMMANDS, *users_limits.COMMANDS, *users_sync.COMMANDS):
    command.add_command(part)
