"""Checks of a node's ports, inbounds and cores, and of its own information. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cryptography import x509

from node.certificate import names_of
from node.doctor.findings import Check, Finding, by, fail, ok, warn
from node.doctor.network import Way
from node.machine.mechanisms import REFUSED
from protos.service_pb2 import BaseInfoResponse, Event

DAY = 86_400.0
# Seconds by which clocks may differ: VMess allows 120, and an HTTP date is rounded down.
APART = 30
# OpenSSL's numbers (X509_V_ERR_): not yet valid and expired; another host name and another address.
_OUT_OF_TIME, _MISNAMED = (9, 10), (62, 64)
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
    for check, is_of_kernel in ((Check.MECHANISMS, True), (Check.WARNINGS, False)):
        lines = [warning for warning in info.warnings if warning.startswith(REFUSED) is is_of_kernel]
        yield from (warn(check, line) for line in lines) if lines else [ok(check, "the node reports none")]
    crashes = [event for event in events if event.kind == "core.exited" and now - event.time < DAY]
    words = f"{len(crashes)} within the last day" + (f", the last: {crashes[-1].text}" if crashes else "")
    yield by(Check.CRASHES, words, warning=bool(crashes))


def way(seen: Way, name: str, grpc: bool) -> Iterator[Finding]:
    """Check the way from this machine to a node that is called by this name, over gRPC or REST."""
    if seen.connection or seen.tls:
        yield fail(Check.REACH, seen.connection or f"the port is open, but TLS fails: {seen.tls}")
        return
    yield ok(Check.REACH, "the port is open")
    shown = x509.load_der_x509_certificate(seen.certificate) if seen.certificate else None
    if seen.code in _MISNAMED:
        names = ", ".join(names_of(shown)) if shown else "another name"
        yield fail(Check.NAME, f"the certificate is for {names}, not for {name}")
    elif seen.refusal:
        within = ""
        if shown and seen.code in _OUT_OF_TIME:
            within = f": valid from {shown.not_valid_before_utc:%Y-%m-%d} to {shown.not_valid_after_utc:%Y-%m-%d}"
        yield fail(Check.TRUST, f"{seen.refusal}{within}")
    else:
        yield ok(Check.TRUST, "trusted")
        yield ok(Check.NAME, name)
    if seen.ahead is not None:
        words = f"the node's clock is {abs(seen.ahead):.0f} s {'ahead' if seen.ahead > 0 else 'behind'}"
        yield by(Check.DIFFERENCE, words, failing=abs(seen.ahead) > APART)
    if seen.http2 is not None:
        found = "HTTP/2" if seen.http2 else "HTTP/1.1 alone: something on the way ends TLS and drops HTTP/2"
        yield by(Check.HTTP2, found, failing=grpc and not seen.http2, warning=not seen.http2)
