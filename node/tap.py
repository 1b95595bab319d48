"""`twistd node`: the only place where the node's parts are put together. Read it first."""

from __future__ import annotations

from node import __version__, import_gc  # first: see there

# isort: split
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from twisted.application.service import IService

from drivers.registry import (
    DRIVER_SETTINGS,
    LISTS_SETTING,
    READS_LISTS,
    REGISTRY,
    Drivers,
    newest_releases,
    set_for,
)
from drivers.registry import (
    Kind as Core,
)
from node.abuse.abuse import Abuse
from node.api.auth import Authenticator
from node.api.calls import Calls
from node.api.keyring import Keyring
from node.api.operations import Operations
from node.base.aio import Aio
from node.base.file_watch import FileWatch
from node.base.logs import Logger, LogRing
from node.base.part import Parts
from node.base.reactor import Reactor
from node.base.sockets import Passed
from node.clock.clock import Clock
from node.command_line import Options
from node.contract.driver import Host
from node.contract.keeper import Keeper
from node.door.ports import Place, Ports
from node.door.tls import Certificates, Demands
from node.engine.engine import Engine
from node.engine.options import EngineOptions
from node.events.journal import Journal
from node.events.kinds import Kind
from node.handover.arrival import Arrival, Sweep
from node.handover.house import House
from node.handover.program import Program, run_check
from node.handover.succession import Succession
from node.handover.ties import Ties
from node.handover.upgrade import Upgrades
from node.machine.mechanisms import Mechanisms
from node.machine.system import SystemStats
from node.machine.systemd import Notifier, Systemd
from node.metrics.figures import Sources as Measured
from node.metrics.pages import Meters, Monitoring
from node.service import NodeService, use_monotonic_clock
from node.settings import BadSettings, Settings, environment, load
from node.state.directory import StateDirectory
from node.state.store import Store
from node.updates.buttons import ROOT, Buttons
from node.updates.jobs import Jobs
from node.updates.policy import Sources
from node.updates.program import Program as Releases
from node.updates.replaceable import LISTS, Kit, Record, Trial
from node.updates.tool import Tool
from node.updates.updates import Updates

import_gc.resume()


def makeService(options: Options) -> IService:
    """Make the node's service. Bad settings end the process with one line for each fault."""
    from twisted.internet import reactor

    node_reactor = cast(Reactor, reactor)
    use_monotonic_clock(node_reactor)
    try:
        settings = load(options.settings(), Path.cwd(), drivers=DRIVER_SETTINGS)
    except BadSettings as bad:
        raise SystemExit("\n".join(f"txnode cannot start: {fault}" for fault in bad.faults)) from bad
    Logger.names_users = settings.log.users
    node = make_node(node_reactor, settings, options.parent or {})
    if options.get("check"):
        raise SystemExit(node.check())
    return node


def make_node(
    reactor: Reactor, settings: Settings, twistd: Mapping[str, Any], cores: Mapping[int, Core] = REGISTRY
) -> NodeService:
    """Make the parts and put them in order. `twistd`: twistd's own options; `cores`: what the node can run."""
    # The cores, what the node keeps and reports, and who runs the cores.
    around = environment()
    ties = Ties.of(around)
    keeper = ties or Keeper()
    state = StateDirectory(settings.state.dir, keeper)
    ring = LogRing(reactor, settings.log.buffer)
    record = _record(settings)
    against = settings.abuse.rules
    own = _withheld(settings), record.choices, keeper, against, settings.ports
    host = Host(reactor, ring, state.run_dir, settings.cores, *own)
    drivers = Drivers(host, cores)
    house = _house(reactor, settings, state, ring, drivers, ties)
    controllers = Passed()
    engine = _engine(reactor, settings, drivers, house, controllers)
    abuse = Abuse(reactor, engine.generations, engine.limits, house.journal, against)

    # The next version, and other releases.
    arrival = Arrival(reactor, around, ties, settings.handover.adopt_seconds, engine.leaving, house)
    succession = Succession(reactor, around, ties, arrival, engine.leaving, house)
    program = Program.of(sys.orig_argv, sys.argv, twistd, settings.state.dir / "program")
    upgrades = Upgrades(reactor, succession, program, partial(run_check, drivers.run, around))
    updates = _updates(reactor, settings, drivers, engine, house, record, upgrades)

    # Keys, calls and ports.
    aio, system, meters = Aio(reactor), SystemStats(reactor), Meters()
    authenticator = Authenticator(settings.keys.key, settings.keys.certified, meters.refused)
    operations = Operations(engine, system, house.parts, updates)
    calls = Calls(operations, ring, authenticator.knows, house.journal, meters.called)
    keyring = _keyring(settings, authenticator, house.journal, calls)
    certificates = _certificates(settings, house.journal)
    place = Place(state.door_dir, settings.metrics.port, keeper, controllers)
    ports = Ports(reactor, aio, calls, authenticator, certificates, settings.door, place)
    monitoring = _monitoring(reactor, settings, engine, house, certificates, ports, meters)
    ports.serve(monitoring.pages, ROOT, Buttons(reactor, updates).all())

    watches = FileWatch("a new certificate", certificates, reactor), FileWatch("new keys", keyring, reactor)
    # Each part may use those before it; they stop in the reverse order.
    begin = (arrival, state, Sweep(arrival, house), aio, system, upgrades, *watches, house.store, house.journal)
    clock = Clock(reactor, house.journal, settings.clock)
    mechanisms = Mechanisms(reactor, drivers.refused)
    house.parts.add(*begin, *engine.parts, abuse, updates, clock, *monitoring.parts, ports, house.systemd, mechanisms)
    return NodeService(reactor, settings, twistd, house, arrival, upgrades, watches)


def _record(settings: Settings) -> Record:
    record = Record(settings.state.dir / "updates" / "chosen", _configured(settings))
    record.load()
    return record


def _house(
    reactor: Reactor, settings: Settings, state: StateDirectory, ring: LogRing, drivers: Drivers, ties: Ties | None
) -> House:
    parts = Parts()
    store = Store(reactor, state.database, parts)
    notifier = Notifier(None, None, ties.alive) if ties else Notifier.from_environment(settings.systemd)
    systemd = Systemd(notifier, reactor, __version__)
    return House(ring, Journal(reactor, store.event), store, parts, systemd, drivers.sweep)


def _engine(reactor: Reactor, settings: Settings, drivers: Drivers, house: House, controllers: Passed) -> Engine:
    chosen = EngineOptions(settings.backend, settings.traffic, settings.limits, settings.quota, settings.metrics.users)
    return Engine(reactor, house.ring, drivers, house.store, house.journal, chosen, controllers)


def _updates(
    reactor: Reactor,
    settings: Settings,
    drivers: Drivers,
    engine: Engine,
    house: House,
    record: Record,
    upgrades: Upgrades,
) -> Updates:
    changes = settings.state.dir / "updates"
    tool = Tool(drivers.run, environment(), settings.updates.proxy)
    kit = Kit(reactor, changes, tool, Trial(reactor, engine.runner), record)
    jobs = Jobs(reactor, changes / "jobs", house.ring, house.journal)
    releases = Releases(kit, settings.state.dir, upgrades)
    sources = Sources(set_for("DOWNLOAD_URL", settings.cores), READS_LISTS, newest_releases())
    return Updates(kit, jobs, releases, drivers, settings.updates, sources)


def _keyring(settings: Settings, authenticator: Authenticator, journal: Journal, calls: Calls) -> Keyring:
    reloaded = partial(journal.reloaded, Kind.KEYS_LOADED, Kind.KEYS_REFUSED)
    return Keyring(settings.keys, authenticator, reloaded, calls.dismiss)


def _certificates(settings: Settings, journal: Journal) -> Certificates:
    door = settings.door
    reloaded = partial(journal.reloaded, Kind.CERTIFICATE_LOADED, Kind.CERTIFICATE_REFUSED)
    return Certificates(door.cert_file, door.key_file, Demands(door.client_ca, door.newest_tls), reloaded)


def _monitoring(
    reactor: Reactor,
    settings: Settings,
    engine: Engine,
    house: House,
    certificates: Certificates,
    ports: Ports,
    meters: Meters,
) -> Monitoring:
    """Make the monitoring of the node."""
    measured = Measured(
        engine,
        house.parts,
        house.store,
        settings.metrics,
        settings.state.dir,
        places=ports.connections.limits.max_connections,
        connections=ports.clients,
        expires=lambda: certificates.current.expires,
    )
    return Monitoring(reactor, measured, meters, ports.rpc.set_ready)


def _withheld(settings: Settings) -> tuple[Path, ...]:
    """The paths that may hold the node's keys, and that cores must not read."""
    keys = (Path.cwd() / ".env", settings.keys.key_file, settings.keys.file)
    return settings.state.dir, *filter(None, keys)


def _configured(settings: Settings) -> dict[str, str]:
    """The executables of cores, and the directory of geo files, that the operator has set."""
    return {**set_for("EXECUTABLE_PATH", settings.cores), LISTS: settings.cores.get(LISTS_SETTING, "")}
