"""Runs all checks of this machine and of the node on it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from node.base.secret_file import exposed
from node.doctor import credentials, kernel, machine, network, running
from node.doctor.config import ANY, Listening, read
from node.doctor.credentials import Pair
from node.doctor.findings import Check, Finding, fail, ok, warn
from node.doctor.running import Core
from node.settings import Settings
from node.state.database import Database
from protos.service_pb2 import Backend


@dataclass(frozen=True)
class Place:
    """A node on this machine: its settings or their faults, its cores and geo files, and the machine's own names."""

    settings: Settings | None
    faults: Sequence[str]
    state: Path
    cores: Sequence[Core]
    geo: Mapping[str, float | None]
    own: Collection[str]


def examine(place: Place) -> list[Finding]:
    """Run all checks; the findings are in the order of `Check`."""
    pid = kernel.node_of(place.state)
    found = [*_settings(place), _node(place, pid), *machine.check(kernel.look(place.state, pid))]
    found += running.cores(place.cores)
    found += running.geo_files(place.geo)
    if place.settings is not None:
        found += _credentials(place.settings, place.own)
        found += _listening(place.settings, place.state, pid)
    order = list(Check)
    return sorted(found, key=lambda finding: order.index(finding.check))


def _settings(place: Place) -> Iterator[Finding]:
    for fault in place.faults:
        yield fail(Check.SETTINGS, fault)
    if not place.faults:
        yield ok(Check.SETTINGS, "all settings can be used")


def _node(place: Place, pid: int | None) -> Finding:
    return warn(Check.NODE, f"no node runs in {place.state}") if pid is None else ok(Check.NODE, f"process {pid}")


def _credentials(settings: Settings, own: Collection[str]) -> Iterator[Finding]:
    host = "" if settings.door.host in ANY else settings.door.host
    pair = Pair(_bytes(settings.door.cert_file), _bytes(settings.door.key_file), host, own)
    yield from credentials.check(pair, datetime.now(UTC))
    files = [settings.door.key_file, settings.keys.file, *filter(None, [settings.keys.key_file])]
    yield credentials.key_files([file for file in files if exposed(file)])


def _listening(settings: Settings, state: Path, pid: int | None) -> Iterator[Finding]:
    own = [port for port in (settings.door.rest_port, settings.door.grpc_port) if port]
    yield from running.ports(network.ports(own, pid))
    try:
        config = _config(state) if pid is not None else Listening()
    except ValueError as error:
        config = Listening()
        yield warn(Check.INBOUNDS, f"not checked: the configuration is not plain JSON: {error}")
    yield from running.reached(Check.INBOUNDS, network.inbounds(config.inbounds))
    yield from running.reached(Check.REALITY, network.destinations(config.destinations))
    wanted = [*own, *(port for inbound in config.inbounds for port in inbound.ports)]
    if (firewall := network.closed(wanted)) is not None:
        yield running.closed(*firewall)


def _config(state: Path) -> Listening:
    """The running configuration, from the state file. Raises `ValueError`."""
    saved = Database(state / "state.db").peek() if os.access(state / "state.db", os.R_OK) else None
    if saved is None or not saved.request:
        return Listening()
    return read(Backend.FromString(saved.request).config)


def _bytes(file: Path) -> bytes | str:
    try:
        return file.read_bytes()
    except OSError as error:
        return f"{file}: {error.strerror}"
