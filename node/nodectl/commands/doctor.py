"""`nodectl doctor`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import click

from node.base.errors import NodeError
from node.doctor import kernel, running
from node.doctor.findings import Check, Finding, Level, fail
from node.doctor.local import examine
from node.nodectl.doctor_input import collect
from node.nodectl.exits import Exit
from node.nodectl.options import options
from node.nodectl.output import Row
from node.nodectl.profiles import LOCAL
from node.nodectl.running import Node, Outcome
from node.nodectl.session import Session

COLUMNS = ("check", "level", "found", "remedy")


@click.command
@options
@click.pass_obj
def command(session: Session) -> None:
    """Check for common problems and print remedies: on this machine, or on the nodes given by --node or --all."""
    outcomes = _elsewhere(session) if session.named or session.all else [_local_findings(session)]
    documents = [Outcome(one.node, [each.document for each in one.answer or ()], one.error) for one in outcomes]
    session.report(documents, COLUMNS, rows, _code(finding for one in outcomes for finding in one.answer or ()))


def rows(findings: Sequence[dict[str, str]]) -> Iterator[Row]:
    for finding in findings:
        yield finding["name"], finding["level"], finding["found"], finding["remedy"]


def _code(findings: Iterable[Finding]) -> Exit:
    return Exit.FAILED if any(finding.level is Level.FAIL for finding in findings) else Exit.OK


def _elsewhere(session: Session) -> list[Outcome[list[Finding]]]:
    return session.ask(_remote_findings)


def _local_findings(session: Session) -> Outcome[list[Finding]]:
    """Findings of this machine, and of the node on it if it runs and its settings can be read."""
    examined = collect(session.local_node)
    findings = examine(examined)
    if examined.settings is not None and kernel.node_of(examined.state) is not None:
        for outcome in session.ask(_remote_findings):
            findings += outcome.answer or _silent(outcome.error)
    return Outcome(LOCAL, findings)


def _silent(error: NodeError | None) -> list[Finding]:
    return [fail(Check.NODE, f"the node does not answer: {error.text}")] if error else []


async def _remote_findings(node: Node) -> list[Finding]:
    """Findings from a node's info and its last crashes. Raises `NodeError`."""
    info = await node.client.info()
    async with node.client.events(kinds=["core.exited"], follow=False) as stream:
        events = [event async for event in stream]
    return list(running.node(info, events, time.time()))
