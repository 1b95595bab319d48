"""`nodectl users limits` and `limit`: what users may use, and have used of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import click

from node.limits import wording
from node.nodectl.exits import Unusable
from node.nodectl.options import options
from node.nodectl.output import Row
from node.nodectl.running import Asked
from node.nodectl.session import Session
from node.nodectl.units import rate_of_bits, size
from protos import service_pb2 as pb

COLUMNS = ("name", "state", "used", "of", "resets", "expires", "addresses", "down", "up", "notes")
# Names that are asked for at once, and seconds: a hundred thousand come on a hundred pages.
NAMES, TIMEOUT = 1000, 60.0


@click.command
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--off", is_flag=True, help="Only those who are out for a limit.")
@options
@click.pass_obj
def limits(session: Session, names: tuple[str, ...], off: bool) -> None:
    """Who has limits, what they have used, and who is out for them."""

    async def ask(node: Asked) -> list[pb.LimitState]:
        return await _all(node, names, off)

    session.report(session.ask(ask, TIMEOUT), COLUMNS, lambda users: map(cells, users))


@click.command
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--to", "words", metavar="WORDS", help=f'What they may use, such as "{wording.WORDS}".')
@click.option("--clear", is_flag=True, help="Take back what was said here: their own message and the settings hold.")
@options
@click.pass_obj
def limit(session: Session, names: tuple[str, ...], words: str | None, clear: bool) -> None:
    """Say what users may use. Of what is not said the settings of the node hold; 0 is no limit.

    A panel that says something else of a user's limits later has the last word.
    """
    if clear == (words is not None):
        raise Unusable("say --to with some words, or --clear")
    said = _said(words) if words is not None else None

    async def work(node: Asked) -> pb.SetLimitsResponse:
        return await node.client.set_limits(dict.fromkeys(names, said))

    session.report(session.ask(work), ("name", "note"), _notes)


COMMANDS = (limits, limit)


def _said(words: str) -> pb.Limits:
    try:
        return wording.limits(words)
    except ValueError as error:
        raise Unusable(str(error)) from error


async def _all(node: Asked, names: Sequence[str], off: bool) -> list[pb.LimitState]:
    """All pages."""
    found: list[pb.LimitState] = []
    for part in [names[begin : begin + NAMES] for begin in range(0, len(names), NAMES)] or [()]:
        after, more = "", True
        while more:
            page = await node.client.get_limits(after, names=part, off=off)
            found += page.users
            more = page.next > after
            after = page.next
    return found


def cells(user: pb.LimitState) -> Row:
    """The user as `COLUMNS` has them."""
    limits, quota = user.limits, user.limits.bytes
    allowed = f"{len(user.addresses)}/{limits.addresses}" if limits.addresses else ""
    return (
        user.name,
        f"off: {', '.join(user.off_for)}" if user.off_for else "in",
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
    """Where nothing is left: of the way that counts, with what was used elsewhere."""
    quota = user.limits.bytes
    ways = {pb.Quota.UP: user.used_up, pb.Quota.DOWN: user.used_down}
    return max(quota.bytes, ways.get(quota.way, user.used_up + user.used_down))


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M") if seconds else ""


def _notes(reply: pb.SetLimitsResponse) -> Iterator[Row]:
    for note in reply.notes:
        yield note.name, note.text
