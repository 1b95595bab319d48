"""`nodectl doctor`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import click

from node.base.errors import Forbidden, NodeError, Unauthenticated
from node.base.pool import in_pool
from node.certificate import own_names
from node.client import Target, UnexpectedReply
from node.doctor import kernel, network, running
from node.doctor.findings import Check, Finding, Level, fail
from node.doctor.local import Place, examine
from node.doctor.running import Core
from node.nodectl.commands import core as cores
from node.nodectl.commands.start import WITH_GEO
from node.nodectl.fleet import Node, Outcome
from node.nodectl.local_node import LocalNode, settings_of
from node.nodectl.nodes_file import LOCAL
from node.nodectl.output import Exit
from node.nodectl.session import Session, options
from node.settings import BadSettings

_DAY = 86_400.0


@click.command
@options
def doctor(session: Session) -> None:
    """Check for common problems and print remedies: on this machine, or on the nodes given by --node or --all."""
    here = session.instance is not None or not (session.named or session.all)
    if here:
        found = [Outcome(session.named[0] if session.named else LOCAL, _local_findings(session))]
    else:
        found = [_put_together(one) for one in session.ask(partial(_way_and_findings, session.targets()))]
    documents = [Outcome(one.node, [each.document for each in one.answer or ()], one.error) for one in found]
    session.report(
        documents,
        ("check", "level", "found", "remedy"),
        lambda found: [(each["name"], each["level"], each["found"], each["remedy"]) for each in found],
        Exit.FAILED,
        lambda found: any(each["level"] == Level.FAIL.value for each in found),
    )


def _local_findings(session: Session) -> list[Finding]:
    """Findings of this machine, and of the node on it if it runs and its settings can be read."""
    place = _place(session.local_node)
    findings = examine(place)
    if place.settings is not None and kernel.node_of(place.state) is not None:
        for outcome in session.ask(_remote_findings):
            if outcome.error is not None:
                findings.append(fail(Check.NODE, f"the node does not answer: {outcome.error.text}"))
            findings += outcome.answer or ()
    return findings


async def _way_and_findings(targets: Mapping[str, Target], node: Node) -> tuple[list[Finding], NodeError | None]:
    """Findings of the way to a node, and its own; or the error of its calls."""
    target = targets[node.name]
    name, grpc = target.asked_name or target.name, target.transport == "grpc"
    seen = await in_pool(node.reactor, network.way, target.name, target.port, name, target.certificates())
    found = list(running.way(seen, name, grpc))
    try:
        return found + await _remote_findings(node), None
    except NodeError as error:
        if isinstance(error, Unauthenticated | Forbidden):
            found.append(fail(Check.KEY, error.text))
        elif grpc and seen.http2 and isinstance(error, UnexpectedReply):
            found.append(fail(Check.HTTP2, f"HTTP/2, but no gRPC: {error.text}"))
        return found, error


def _put_together(outcome: Outcome[tuple[list[Finding], NodeError | None]]) -> Outcome[list[Finding]]:
    findings, error = outcome.answer or ([], outcome.error)
    return Outcome(outcome.node, findings, error)


async def _remote_findings(node: Node) -> list[Finding]:
    """Findings from a node's info and its last crashes. Raises `NodeError`."""
    info = await node.client.info()
    async with node.client.events(kinds=["core.exited"], follow=False) as stream:
        events = [event async for event in stream]
    return list(running.node(info, events, time.time()))


def _place(local: LocalNode) -> Place:
    """The facts of this node for the doctor: its settings or their faults, its cores and their geo files."""
    settings, faults = None, list[str]()
    try:
        settings = settings_of(local)
    except BadSettings as bad:
        faults = bad.faults
    found = list(_cores(local))
    return Place(settings, faults, local.state, found, _geo(local, found), tuple(own_names()))


def _cores(local: LocalNode) -> Iterator[Core]:
    for name, pinned in cores.PINNED.items():
        try:
            path, release = cores.used(local, name) or ("", "")
        except cores.InstallError as error:
            yield Core(name, fault=str(error))
        else:
            yield Core(name, str(path), release, pinned.version)


def _geo(local: LocalNode, found: list[Core]) -> dict[str, float | None]:
    """Ages of the geo files in days, None for a missing one; empty where no installed core reads them."""
    executable = next((core.path for core in found if core.name == WITH_GEO and core.path), "")
    if not executable:
        return {}
    named = local.values.get(cores.PINNED[WITH_GEO].variable("ASSETS_PATH"))
    directory = Path(named or Path(executable).resolve().parent)
    return {name: _age(directory / name) for name in ("geoip.dat", "geosite.dat")}


def _age(file: Path) -> float | None:
    try:
        return (time.time() - file.stat().st_mtime) / _DAY
    except OSError:
        return None
