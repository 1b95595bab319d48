"""`nodectl users diff` and `sync`: compare the users of a file with those of nodes, and apply the difference."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import Progress

from node.nodectl import users_file
from node.nodectl.fleet import Fleet, Node, Outcome, answers
from node.nodectl.members import Difference, difference, listed, note_refused, refusals, send
from node.nodectl.output import Exit, Row, Unusable, note
from node.nodectl.session import Session, inbound_option, options
from protos import service_pb2 as pb

Answer = dict[str, Any]

# The share of a node's users that sync removes without asking.
SHARE = 0.2
# Names in the question.
LISTED = 20

_FILE = click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
_INBOUNDS = inbound_option(help="Let users without inbounds in FILE into this inbound; may be repeated.")
COUNTED = ("added", "changed", "removed", "same", "refused")


@click.command
@_FILE
@_INBOUNDS
@options
def diff(session: Session, source: Path, inbounds: tuple[str, ...]) -> None:
    """Show what `sync` would change: + adds, ~ changes, - removes a user. The exit code is 7 if there are changes."""
    _show(session, users_file.read(source, inbounds))


@click.command
@_FILE
@_INBOUNDS
@click.option("--dry-run", is_flag=True, help="Change nothing; show what would change, like diff.")
@click.option("--yes", is_flag=True, help=f"Do not ask before removing more than {SHARE:.0%} of a node's users.")
@options
def sync(session: Session, source: Path, inbounds: tuple[str, ...], dry_run: bool, yes: bool) -> None:
    """Make the users in FILE (a table or JSON) the users of the nodes.

    Only differences are sent, removals first. Users who are not in FILE are removed. Other users notice nothing.
    """
    users = users_file.read(source, inbounds)
    if dry_run:
        _show(session, users)
    outcomes = session.attend(partial(_sync, session, users, yes))
    note_refused(outcomes)
    session.report(outcomes, COUNTED, _counted, Exit.USERS_REFUSED, lambda answer: bool(answer["refused"]))


def _show(session: Session, users: Sequence[pb.User]) -> NoReturn:
    async def work(node: Node) -> dict[str, Any]:
        return (await _compared(users, node)).document

    outcomes = session.ask(work)
    session.report(outcomes, ("", "name", "what"), _differences, Exit.DIFFERENT, lambda found: any(_differences(found)))


async def _compared(users: Sequence[pb.User], node: Node) -> Difference:
    return difference(users, (await listed(node, credentials=True)).users)


async def _sync(session: Session, users: Sequence[pb.User], yes: bool, fleet: Fleet) -> list[Outcome[Answer]]:
    compared = await fleet.ask(partial(_compared, users))
    plans, faults = dict(answers(compared)), {outcome.node: outcome.error for outcome in compared if outcome.error}
    if not yes:
        _confirm(plans)
    console = Console(stderr=True)
    with Progress(console=console, disable=session.json or not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("users", total=sum(len(plan.updates) for plan in plans.values()))

        async def work(node: Node) -> Answer:
            if node.name in faults:
                raise faults[node.name]
            plan = plans[node.name]
            refused = await send(node, plan.updates, partial(progress.advance, bar))
            counts = {"added": len(plan.added), "changed": len(plan.changed), "removed": len(plan.removed)}
            return {**counts, "same": plan.same, "refused": refusals(refused)}

        return await fleet.ask(work)


def _confirm(plans: Mapping[str, Difference]) -> None:
    """Ask before removing many users. Raises `Unusable` for no, and without a terminal; `KeyboardInterrupt`."""
    drastic = {name: plan for name, plan in plans.items() if len(plan.removed) > SHARE * plan.there}
    for name, plan in drastic.items():
        gone = ", ".join(plan.removed[:LISTED]) + (" and others" if len(plan.removed) > LISTED else "")
        note(f"{name}: {len(plan.removed)} of {plan.there} users would be removed: {gone}")
    if not drastic:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Unusable("nothing was changed: to remove so many users, give --yes")
    with _interruptible():
        if not click.confirm("Remove them?", err=True):
            raise Unusable("not confirmed: nothing was changed")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt the question: the reactor, which handles it otherwise, is blocked meanwhile."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except click.Abort:
        raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def _differences(answer: Mapping[str, Any]) -> Iterator[Row]:
    yield from (("+", name, "") for name in answer["added"])
    yield from (("~", changed["name"], ", ".join(changed["what"])) for changed in answer["changed"])
    yield from (("-", name, "") for name in answer["removed"])


def _counted(answer: Mapping[str, Any]) -> Iterator[Row]:
    yield tuple(len(answer[column]) if column == "refused" else answer[column] for column in COUNTED)
