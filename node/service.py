"""The node as a service of Twisted: starts and stops its parts, reloads files, and checks if it could take over."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from twisted.application.service import IServiceCollection, Service
from twisted.internet.defer import Deferred, ensureDeferred, succeed
from twisted.internet.error import CannotListenError

from node import __version__, log_lines
from node.base.file_watch import FileWatch
from node.base.logs import Logger
from node.base.reactor import Reactor
from node.door.tls import BadPair
from node.events.kinds import Kind
from node.handover.arrival import Arrival
from node.handover.house import House
from node.handover.keeper import raise_descriptor_limit
from node.handover.program import CHECKING, KEPT
from node.handover.upgrade import Upgrades
from node.keys.keyfile import BadKeys
from node.settings import Settings, environment

# Seconds after which a computing thread lets other threads run. With Python's default of 5 ms, building a large set of
# users stalls every call by a multiple of that.
SWITCH_INTERVAL = 0.0005


def use_monotonic_clock(reactor: Reactor) -> None:
    """Make all timers run on the monotonic clock. To be called before there is any timer.

    Twisted's timers run on the time of day. When that is set back, no timer fires for as long, and systemd's watchdog
    gets no message; when it is set ahead, all timeouts expire at once.
    """
    # Delayed calls, `LoopingCall` and the reactor's own waiting all call this.
    reactor.seconds = time.monotonic  # type: ignore[method-assign]


class NodeService(Service):
    """Starts the parts of `house` in order, and stops them one by one, each awaited. `watches`: files to reload."""

    log = Logger()

    def __init__(
        self,
        reactor: Reactor,
        settings: Settings,
        twistd: Mapping[str, Any],
        house: House,
        arrival: Arrival,
        upgrades: Upgrades,
        watches: tuple[FileWatch, ...],
    ) -> None:
        """`twistd`: twistd's own options, which say where the log goes."""
        self._reactor = reactor
        self._settings = settings
        self._twistd = twistd
        self._house = house
        self._arrival = arrival
        self._upgrades = upgrades
        self._watches = watches
        # Whether the parts have started: a version that waits beside another one has begun nothing.
        self._begun = False

    def check(self) -> int:
        """Print whether this version could take over from a running node, and return the exit code."""
        try:
            for watch in self._watches:
                watch.files.load()
            self._house.store.look()
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

    def startService(self) -> None:
        super().startService()
        # Otherwise a Ctrl-C before the reactor runs raises somewhere in here, and gRPC's threads keep the process.
        signal.signal(signal.SIGINT, self._reactor.sigInt)  # type: ignore[attr-defined]
        # Only the node's user may read what the node and its cores write.
        os.umask(0o077)
        sys.setswitchinterval(SWITCH_INTERVAL)
        raise_descriptor_limit()
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
        """Start all parts. Raises `SystemExit` if that is impossible."""
        self._begun = True
        try:
            self._house.parts.start()
        except (OSError, BadPair, BadKeys, CannotListenError) as error:
            raise SystemExit(f"txnode cannot start: {error}") from error
        self._reactor.callWhenRunning(self._ready)

    def _ready(self) -> None:
        signal.signal(signal.SIGUSR2, lambda *_: self._reactor.callFromThread(self._upgrades.ask))
        signal.signal(signal.SIGHUP, lambda *_: self._reactor.callFromThread(self._reload))
        self._house.ring.event(f"txnode {__version__} is ready")
        self.log.info(
            "txnode {version} is ready: REST {rest}, gRPC {grpc}",
            version=__version__,
            rest=self._settings.door.rest_port or "no port of its own",
            grpc=self._settings.door.grpc_port or "no port of its own",
        )
        self._house.parts.begin()

    def _reload(self) -> None:
        """Reload the certificate and the keys."""
        for watch in self._watches:
            watch.files.reload()

    def stopService(self) -> Deferred[None]:
        super().stopService()
        return ensureDeferred(self._stop()) if self._begun else succeed(None)

    async def _stop(self) -> None:
        self._arrival.end()
        self._house.journal.tell(Kind.NODE_STOPPING, "the node is stopping")
        await self._house.parts.stop()
