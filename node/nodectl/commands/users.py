"""`nodectl users`: who is wanted and confirmed."""

from __future__ import annotations

from typing import Any

import click

from node.nodectl.commands import users_change, users_limits, users_sync
from node.nodectl.members import Listed, listed
from node.nodectl.options import options
from node.nodectl.output import note
from node.nodectl.running import Asked, each
from node.nodectl.session import Session
from node.nodectl.users.rows import COLUMNS, WIDE, cells, settled

# Seconds: a hundred thousand come on a hundred pages.
TIMEOUT = 60.0


@click.group
def command() -> None:
    """Who may use a node, and who is in: list, add, change, remove, limits, limit, diff, sync."""


@command.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--wide", is_flag=True, help="Say all that is known, and which credentials there are (not the secrets).")
@click.option("--unconfirmed", is_flag=True, help="Only those who are not in as they should be, and why.")
@click.option("--credentials", is_flag=True, help="With --json: have what users get in by; takes a key of scope all.")
@options
@click.pass_obj
def list_users(session: Session, names: tuple[str, ...], wide: bool, unconfirmed: bool, credentials: bool) -> None:
    """Whom the node wants to be in, and what the core has confirmed of it."""
    if credentials and not session.json:
        raise click.UsageError("--credentials takes --json: secrets are for scripts, not for screens")

    async def ask(node: Asked) -> dict[str, Any]:
        found = await listed(node, names, credentials)
        if unconfirmed:
            found.users = [row for row in found.users if not settled(row)]
        return vars(found)

    outcomes = session.ask(ask, TIMEOUT)
    for name, answer in each(outcomes):
        if answer["changed"]:
            note(f"{name}: users changed while they were listed")
    columns = COLUMNS + WIDE if wide else COLUMNS
    session.report(outcomes, columns, lambda answer: [cells(row, wide) for row in Listed(**answer).users])


for part in (*users_change.COMMANDS, *users_limits.COMMANDS, *users_sync.COMMANDS):
    command.add_command(part)
