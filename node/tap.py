"""`twistd node`: its options, and the only place where the node's parts are put together. Read it first."""

from __future__ import annotations

from node import import_gc  # first: see there

# isort: split
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from twisted.application.service import IService, IServiceCollection, Service
from twisted.internet.defer import Deferred, ensureDeferred, gatherResults, maybeDeferred, succeed
from twisted.internet.error import CannotListenError
from twisted.python.usage import Options as UsageOptions
from twisted.python.usage import UsageError

from drivers.registry import DRIVER_SETTINGS, LISTS_SETTING, READS_LISTS, Drivers, set_for
from node import __version__, deployed, log_lines
from node.api.auth import Authenticator
from node.api.calls import Calls
from node.api.keyring import Keyring
from node.api.operations import Operations
from node.base.aio import Aio
from node.base.file_watch import FileWatch
from node.base.logs import Logger, LogRing
from node.base.part import Parts
from node.base.reactor import Reactor
from node.clock.clock import Clock
from node.contract.choices import Choices
from node.contract.driver import Host
from node.contract.keeper import NoKeeper
from node.door import connections
from node.door.entrance import Entrance
from node.door.tls import GRPC_FIRST, REST_FIRST, BadPair, Certificates, CertificateWatch, Demands, Protocols
from node.door.upstream import Upstream
from node.engine.engine import Engine
from node.engine.options import EngineOptions
from node.events.journal import Journal
from node.events.kinds import Kind
from node.handover.arrival import Arrival
from node.handover.house import House
from node.handover.program import CHECKING, KEPT, Program, Tried
from node.handover.succession import Succession
from node.handover.ties import Ties
from node.handover.upgrade import Upgrades
from node.keys.keyfile import BadKeys
from node.machine.system import SystemStats
from node.machine.systemd import Notifier, Systemd
from node.metrics.keyless import is_open_here, is_open_to_others
from node.metrics.monitoring import Monitoring
from node.metrics.pages import Meters
from node.settings import BadSettings, Settings, all_settings, environment, load
from node.state.directory import StateDirectory
from node.state.store import Store
from node.transport.rest import make_app, make_pages
from node.transport.rpc import RpcServer
from node.transport.site import Limits as SiteLimits
from node.transport.site import Site
from node.updates.chosen import LISTS, Record
from node.updates.policy import Sources
from node.updates.updates import Updates

import_gc.resume()

SETTINGS = all_settings(DRIVER_SETTINGS)
BIND_SECONDS = 10.0
LOOPBACK = "127.0.0.1"
# Limits of the metrics port.
FEW = SiteLimits(max_connections=32, strangers=32, max_body=0)
# Seconds after which a computing thread lets other threads run. With Python's default of 5 ms, building a large set of
# users stalls every call by a multiple of that.
SWITCH_INTERVAL = 0.0005
# Open files that the node allows itself, if the system permits: for the connections on both ports, with a reserve.
DESCRIPTORS = 65_536


class Options(UsageOptions):
    """The command line: an option for every setting that is not secret. The environment and `.env` have them, too."""

    synopsis = "[options]"
    longdesc = (
        "Runs a proxy core for a controller that calls over REST or gRPC. The node reads settings from .env in the "
        "working directory, the environment and these options; a later source overrides an earlier one. Brackets have "
        "a setting's name and default; docs/settings.md says when to change it. API_KEY and UPDATE_PROXY may hold "
        "secrets, and other users can read options: set these two in .env or in the environment."
    )
    optParameters = [  # noqa: N815, RUF012 - Twisted's form
        [setting.option, None, None, f"{setting.text} [{setting.name}={setting.default}]"]
        for setting in SETTINGS
        if not setting.secret
    ]

    optFlags = [["check", None, "print whether this version could take over from a running node, and exit"]]  # noqa: N815, RUF012

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Parse the options; refuse abbreviations, which Twisted allows.

        `--api-key=…` would be one, and show the key to every user of the machine.
        """
        words = list(sys.argv[1:] if options is None else options)
        for name in (word.partition("=")[0] for word in words if word.startswith("--")):
            if name[2:] not in self._names():
                raise UsageError(f"there is no option {name}")
        super().parseOptions(words)

    def _names(self) -> set[str]:
        """The names of all options, spelled in full."""
        return {option.rstrip("=") for option in self.longOpt}

    def settings(self) -> dict[str, str]:
        """The values given on the command line, by setting name."""
        given = {setting.name: self.get(setting.option) for setting in SETTINGS}
        return {name: value for name, value in given.items() if value is not None}


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
    node = NodeService(node_reactor, settings, options.parent or {})
    if options.get("check"):
        raise SystemExit(node.check())
    return node


def use_monotonic_clock(reactor: Reactor) -> None:
    """Make all timers run on the monotonic clock. To be called before there is any timer.

    Twisted's timers run on the time of day. When that is set back, no timer fires for as long, and systemd's watchdog
    gets no message; when it is set ahead, all timeouts expire at once.
    """
    # Delayed calls, `LoopingCall` and the reactor's own waiting all call this.
    reactor.seconds = time.monotonic  # type: ignore[method-assign]


class NodeService(Service):
    """The node: makes its parts, starts them in order, and stops them one by one, each awaited."""

    log = Logger()

    def __init__(self, reactor: Reactor, settings: Settings, twistd: Mapping[str, Any] | None = None) -> None:
        """`twistd`: twistd's own options, which say where the log goes."""
        self._twistd = twistd or {}
        self._reactor = reactor
        self._settings = settings
        # Whether this process is the node, and not only to be it.
        self._begun = False
        self._state = StateDirectory(settings.state.dir)
        self._aio = Aio(reactor)
        self._ring = LogRing(reactor, settings.log.buffer)
        self._system = SystemStats(reactor)
        sources, self._record = _sources(settings), Record(settings.state.dir / "updates" / "chosen")
        self._configured = {**sources.configured, LISTS: sources.lists_configured}
        self._choices = Choices()
        self._read_choices()
        ties = Ties.of(environment())
        host = Host(
            *(reactor, self._ring, self._state.run_dir, settings.cores, _withheld(settings), self._choices),
            ties or NoKeeper(),
        )
        self._drivers = Drivers(host)
        parts = self._parts = Parts()
        self._store = Store(reactor, self._state.database, parts)
        self._journal = Journal(reactor, self._store.event)
        door, reloaded = settings.door, self._journal.reloaded
        self._certificates = Certificates(
            *(door.cert_file, door.key_file, Demands(door.client_ca, door.newest_tls)),
            partial(reloaded, Kind.CERTIFICATE_LOADED, Kind.CERTIFICATE_REFUSED),
        )
        self._watch = CertificateWatch(self._certificates, reactor)
        notifier = Notifier(None, None, ties.alive) if ties else Notifier.from_environment(settings.systemd)
        self._systemd = Systemd(notifier, reactor)
        authenticator = Authenticator(settings.keys.key, settings.keys.certified)
        secrets = [settings.keys.key_file] if settings.keys.key_file else []
        self._keyring = Keyring(
            *(settings.keys.file, settings.keys.required, authenticator, secrets),
            partial(reloaded, Kind.KEYS_LOADED, Kind.KEYS_REFUSED),
        )
        self._keys_watch = FileWatch("new keys", self._keyring, reactor)
        meters = Meters()
        authenticator.refused = meters.refused
        for part in (self._system, self._watch, self._keys_watch, self._store, self._journal):
            parts.add(part)
        options = EngineOptions(
            *(settings.backend, settings.traffic, settings.limits, settings.quota, settings.metrics.users)
        )
        self._engine = engine = Engine(reactor, self._ring, self._drivers, self._store, self._journal, options, parts)
        self._operations = Operations(engine, self._system, parts)
        self._calls = calls = Calls(self._operations, self._ring, authenticator.knows, self._journal, meters.called)
        self._keyring.gone = calls.dismiss
        self._upstream = Upstream(reactor, self._state.door_dir)
        self._rpc = RpcServer(self._aio, calls, authenticator, self._upstream)
        self._monitoring = self._monitored(meters)
        self._monitoring.readiness.changed = self._rpc.set_ready
        self._site, self._metrics_site = self._sites(calls, authenticator)
        self._entrance = Entrance(self._site.connections, self._site, self._upstream)
        around = environment()
        house = House(
            self._ring,
            self._journal,
            self._store,
            parts,
            calls,
            self._site.connections,
            self._systemd,
            self._drivers.sweep,
        )
        self._arrival = Arrival(reactor, around, ties, settings.handover.adopt_seconds, engine.leaving, house)
        self._succession = Succession(reactor, around, ties, self._arrival, engine.leaving, house)
        self._ports = self._arrival.ports
        kept = settings.state.dir / "program"
        program = Program.of(sys.orig_argv, self._twistd, kept)
        self._upgrades = Upgrades(reactor, self._succession, program, self._run)
        self._updates = Updates(
            *(reactor, settings.state.dir / "updates"),
            kept=kept,
            ring=self._ring,
            journal=self._journal,
            policy=settings.updates,
            sources=sources,
            drivers=self._drivers,
            runner=engine.runner,
            record=self._record,
            choices=self._choices,
            run=self._drivers.run,
            environment=environment(),
            test=self._upgrades.test,
            become=self._upgrades.wanted,
        )
        self._operations.updates = self._updates
        self._succession.jobs = self._updates.jobs
        parts.add(Clock(reactor, self._journal, settings.clock))
        parts.add(self._monitoring.lag)
        parts.add(self._monitoring.readiness)
        parts.add(self._systemd)

    def _read_choices(self) -> None:
        """Read what updates have chosen; again at the take-over: the version before may have chosen something since."""
        self._record.load()
        found = self._record.choices(self._configured)
        self._choices.executables, self._choices.lists = found.executables, found.lists

    async def _run(self, command: Sequence[str], *, seconds: float, modules: Path | None = None) -> Tried:
        """Run a command of the node's own to its end, such as another version's check."""
        own = {CHECKING: "yes"} | ({"PYTHONPATH": str(modules)} if modules else {})
        return await self._drivers.run(command, {**environment(), **own}, seconds)

    def check(self) -> int:
        """Print whether this version could take over from a running node, and return the exit code."""
        try:
            self._certificates.load()
            self._keyring.load()
            self._store.look()
        except (OSError, BadPair, BadKeys) as error:
            print(f"txnode {__version__} cannot start: {error}")  # noqa: T201
            return 1
        if CHECKING not in environment():
            print("restart the node to change to this version, if the one that runs has no keeper")  # noqa: T201
            return 1
        print(KEPT)  # noqa: T201 - read by the node that runs the check
        print(f"txnode {__version__}")  # noqa: T201 - read by the node that runs the check
        return 0

    def setServiceParent(self, parent: IServiceCollection) -> None:
        """Also install the JSON log: the application begins its log after this call."""
        super().setServiceParent(parent)
        if self._settings.log.json:
            try:
                log_lines.install(parent, self._twistd, self._reactor.callFromThread)
            except ValueError as error:
                raise SystemExit(f"txnode cannot start: {error}") from error

    def _monitored(self, meters: Meters) -> Monitoring:
        """Make the metrics, the readiness check and their pages."""
        return Monitoring(
            *(self._reactor, self._engine, self._parts, self._store, meters),
            state_dir=self._settings.state.dir,
            places=connections.Limits.max_connections,
            users=self._settings.metrics.users,
            prefix=self._settings.metrics.prefix,
            connections=self._connections,
            expires=lambda: self._certificates.current.expires,
        )

    def _sites(self, calls: Calls, authenticator: Authenticator) -> tuple[Site, Site]:
        """Make the site of the REST interface, and that of the metrics port."""
        reactor, debug, pages = self._reactor, self._settings.door.debug, self._monitoring.pages
        site = Site(
            make_app(calls, pages),
            authenticator,
            reactor,
            log_requests=debug,
            heard=calls.touch,
            pages=pages,
            is_open=partial(is_open_here, frozenset(page.path for page in pages if page.is_open)),
        )
        few = Site(make_pages(pages), authenticator, reactor, FEW, debug, pages=pages, is_open=is_open_to_others)
        return site, few

    def _connections(self) -> Iterator[tuple[str, bool]]:
        """The open connections: the protocol of each one's port, and whether the client has shown a key."""
        for connection in self._site.connections:
            port = connection.transport.getHost().port
            yield "rest" if port == self._settings.door.rest_port else "grpc", connection.known

    def startService(self) -> None:
        super().startService()
        # Otherwise a Ctrl-C before the reactor runs raises somewhere in here, and gRPC's threads keep the process.
        signal.signal(signal.SIGINT, self._reactor.sigInt)  # type: ignore[attr-defined]
        # Only the node's user may read what the node and its cores write.
        os.umask(0o077)
        self._log_ignored()
        sys.setswitchinterval(SWITCH_INTERVAL)
        _raise_descriptor_limit()
        if self._arrival.follows:
            self._reactor.callWhenRunning(self._start_beside)
        else:
            self._take_over()

    def _start_beside(self) -> None:
        """Prepare the resume while the version before serves, then take over."""
        done = ensureDeferred(self._arrival.prepare())
        done.addCallback(lambda _: self._take_over() if self.running else None)
        done.addErrback(self._arrival.abandon)

    def _take_over(self) -> None:
        """Receive what the node before has left, and start all parts. Raises `SystemExit` if that is impossible."""
        self._begun = True
        try:
            self._arrival.take()
            self._read_choices()
            self._state.claim(self._arrival.lock)
            self._upgrades.prepare()
            self._certificates.load()
            self._keyring.load()
            self._sweep()
            self._updates.load()
            self._aio.start()
            self._parts.start()
            self._upstream.sweep()
            self._aio.block(self._rpc.start(), BIND_SECONDS)
            self._listen("grpc", self._settings.door.grpc_port, GRPC_FIRST)
            self._listen("rest", self._settings.door.rest_port, REST_FIRST)
            self._listen_for_metrics()
            self._arrival.hold(self._state.lock)
        except (OSError, BadPair, BadKeys, CannotListenError) as error:
            raise SystemExit(f"txnode cannot start: {error}") from error
        self._arrival.inherit()
        self._reactor.callWhenRunning(self._ready)
        self._reactor.callWhenRunning(self._parts.begin)

    def stopService(self) -> Deferred[None]:
        super().stopService()
        # A version that waits beside another one has begun nothing.
        return ensureDeferred(self._stop()) if self._begun else succeed(None)

    async def _stop(self) -> None:
        """Stop each part, also if those before it failed to stop."""
        self._arrival.end()
        self._journal.tell(Kind.NODE_STOPPING, "the node is stopping")
        ends: tuple[tuple[str, Callable[[], object]], ...] = (
            ("the systemd notifier", self._systemd.stop),
            ("the listeners", self._stop_listening),
            ("the connections of REST clients", self._site.connections.dismiss),
            ("the gRPC server", lambda: self._aio.run(self._rpc.stop())),
            ("the remaining connections", self._site.connections.disconnect),
            ("the connections to METRICS_PORT", self._metrics_site.connections.disconnect),
            ("the updates", self._updates.close),
            ("the calls", self._calls.close),
            ("the parts", self._parts.stop),
            ("the asyncio thread", self._aio.stop),
            ("the lock of the state directory", self._state.stop),
        )
        for part, end in ends:
            try:
                await maybeDeferred(end)
            except Exception:  # noqa: BLE001 - logged; the other parts are stopped all the same
                self.log.failure("could not stop {part} cleanly; the other parts are stopped all the same", part=part)

    def _stop_listening(self) -> object:
        return gatherResults([maybeDeferred(port.stopListening) for port in self._ports.values()], consumeErrors=True)

    def _sweep(self) -> None:
        for pid in self._drivers.sweep(self._arrival.cores):
            self.log.warn("ended core {pid}, left behind by an earlier node", pid=pid)

    def _listen(self, name: str, port: int | None, protocols: Protocols) -> None:
        """Listen on a port. Both protocols are served on each; `protocols` is their order for ALPN."""
        if port is not None:
            everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - the documented default
            interface = self._settings.door.host or everywhere
            context = self._certificates.context_factory(protocols)
            held = self._arrival.held(name, interface, port)
            self._ports[name] = self._entrance.listen(self._reactor, port, interface, context, held)
            if held is not None:
                os.close(held)

    def _listen_for_metrics(self) -> None:
        if (port := self._settings.metrics.port) is not None:
            site: Any = self._metrics_site
            held = self._arrival.held("metrics", LOOPBACK, port)
            if held is None:
                self._ports["metrics"] = self._reactor.listenTCP(port, site, interface=LOOPBACK)
            else:
                self._ports["metrics"] = cast(Any, self._reactor).adoptStreamPort(held, socket.AF_INET, site)
                os.close(held)

    def _ready(self) -> None:
        signal.signal(signal.SIGUSR2, lambda *_: self._reactor.callFromThread(self._upgrades.ask))
        signal.signal(signal.SIGHUP, lambda *_: self._reactor.callFromThread(self._reload))
        # After both handlers: a signal that came while the node did not run is delivered now.
        self._arrival.ready(self._begin)
        self._ring.event(f"txnode {__version__} is ready")
        self.log.info(
            "txnode {version} is ready: REST {rest}, gRPC {grpc}",
            version=__version__,
            rest=self._settings.door.rest_port or "no port of its own",
            grpc=self._settings.door.grpc_port or "no port of its own",
        )
        self._systemd.ready()

    def _begin(self) -> None:
        """Called when it is certain that this node process goes on, and not the one before it."""
        self._upgrades.begin()
        self._updates.begin(self._arrival.outcome)

    def _log_ignored(self) -> None:
        if ignored := self._settings.ignored:
            names = deployed.described(ignored)
            self.log.info("settings of other nodes are ignored: {names}; see docs/migrate.md", names=names)

    def _reload(self) -> None:
        """Reload the certificate and the keys."""
        self._certificates.reload()
        self._keyring.reload()


def _withheld(settings: Settings) -> tuple[Path, ...]:
    """The paths that may hold the node's keys, and that cores must not read."""
    keys = (Path.cwd() / ".env", settings.keys.key_file, settings.keys.file)
    return settings.state.dir, *filter(None, keys)


def _sources(settings: Settings) -> Sources:
    """Where cores are downloaded from, and which settings of theirs the operator has set."""
    values = settings.cores
    configured, mirrors = set_for("EXECUTABLE_PATH", values), set_for("DOWNLOAD_URL", values)
    return Sources(mirrors, configured, READS_LISTS, values.get(LISTS_SETTING, ""))


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files: strangers could use up the 1,024 of many systems, and no core could start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
