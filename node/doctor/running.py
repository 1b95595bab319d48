"""Checks of a node's ports, inbounds and cores, and of its own information. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from node.doctor.findings import Check, Finding, by, fail, ok, warn
from protos.service_pb2 import BaseInfoResponse, Event

DAY = 86_400.0
# Days after which geo files count as old.
OLD = 90


@dataclass(frozen=True)
class Core:
    """A core on this machine: its path, its release and the tested (pinned) one; or why it cannot be used."""

    name: str
    path: str = ""
    release: str = ""
    pinned: str = ""
    fault: str = ""


def ports(states: Mapping[int, str]) -> Iterator[Finding]:
    """Check the node's ports: `states` are "ours", "free", or who has the port."""
    for port, state in states.items():
        found = f"{port}: {state}"
        yield by(Check.PORTS, found, failing=state not in ("ours", "free"), warning=state == "free")


def closed(name: str, ports: Collection[int]) -> Finding:
    """Report the ports that a firewall blocks."""
    found = f"{name} blocks {', '.join(map(str, sorted(ports)))}" if ports else f"{name} allows all of them"
    return by(Check.FIREWALL, found, warning=bool(ports))


def reached(check: Check, faults: Mapping[str, str]) -> Iterator[Finding]:
    """Check inbounds or REALITY destinations: by name, why it accepts no connection, or ""."""
    for name, fault in faults.items():
        yield fail(check, f"{name}: {fault}") if fault else ok(check, name)


def cores(found: Sequence[Core]) -> Iterator[Finding]:
    """Check the installed cores. One is enough: the controller chooses which one runs."""
    lacking = not any(core.path for core in found)
    for core in found:
        if core.fault:
            yield fail(Check.CORE, f"{core.name}: {core.fault}")
        elif not core.path:
            if lacking:
                yield fail(Check.CORE, f"{core.name} is not installed")
        elif core.release != core.pinned:
            yield warn(Check.CORE, f"{core.name} is {core.release}; this node was tested with {core.pinned}")
        else:
            yield ok(Check.CORE, f"{core.name} {core.release}")


def geo_files(ages: Mapping[str, float | None]) -> Iterator[Finding]:
    """Check geo files: by name, the age in days, or None if there is no such file."""
    for name, age in ages.items():
        found = f"there is no {name}" if age is None else f"{name} is {age:.0f} days old"
        yield by(Check.GEO, found, warning=age is None or age > OLD)


def node(info: BaseInfoResponse, events: Sequence[Event], now: float) -> Iterator[Finding]:
    """Check a node's state, warnings and crashes, from its information and events."""
    state = f"{info.state}{f': {info.reason}' if info.reason else ''}"
    yield by(Check.STATE, state, failing=info.state == "failed", warning=info.state == "restarting")
    for warning in info.warnings:
        yield warn(Check.WARNINGS, warning)
    if not info.warnings:
        yield ok(Check.WARNINGS, "none")
    crashes = [event for event in events if event.kind == "core.exited" and now - event.time < DAY]
    words = f"{len(crashes)} within the last day" + (f", the last: {crashes[-1].text}" if crashes else "")
    yield by(Check.CRASHES, words, warning=bool(crashes))
