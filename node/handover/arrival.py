"""What a node takes over from the one before, which ends for an upgrade, or was killed."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Any

from twisted.internet.defer import ensureDeferred
from twisted.python.failure import Failure

from node import __version__
from node.base.logs import Logger
from node.base.reactor import PooledReactor
from node.contract.keeper import Keeper, NoKeeper
from node.handover import attempt
from node.handover.attempt import TRYING
from node.handover.house import House
from node.handover.keeper import FAILED, WAITING
from node.handover.leaving import Leaving
from node.handover.program import PATH
from node.handover.snapshots import Snapshots, read_memory
from node.handover.ties import Ties
from protos.handover_pb2 import Handover

# Seconds that the next version may take to prepare the resume.
AHEAD = 10.0


class Arrival:
    """Satisfies `node.contract.driver.Heirs`. `ports`: the listening ports of this node, by name.

    Without `ties` there is no keeper, and nothing is taken over. `seconds`: for how long cores go on without any node.
    """

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        environment: MutableMapping[str, str],
        ties: Ties | None,
        seconds: float,
        leaving: Leaving,
        house: House,
    ) -> None:
        self._reactor = reactor
        self._environment = environment
        self._ties = ties
        self._keeper: Keeper = ties or NoKeeper()
        self._seconds = seconds
        self._leaving = leaving
        self._house = house
        self._left = Handover()
        # Why the next version failed, if this one runs again.
        self._failed = ""
        self._commit: Callable[[], None] = lambda: None
        # Whether everything serves, and whether the node is ending.
        self._ready = self.ending = False
        self.ports: dict[str, Any] = {}
        self.snapshots = Snapshots(reactor, ties, leaving, house.ring) if ties is not None else None

    @property
    def follows(self) -> bool:
        """Whether the version before still serves: it ends when this one calls `take`."""
        return self._ties is not None and TRYING in self._environment

    async def prepare(self) -> None:
        """Prepare the resume while the version before serves; what fails now is tried again after its end."""
        try:
            if (saved := self._house.store.peek()) is not None:
                await ensureDeferred(self._leaving.prepare(saved)).addTimeout(AHEAD, self._reactor)
        except Exception as error:  # noqa: BLE001 - logged; only the upgrade takes longer
            self.log.warn("nothing was prepared before the version before ends: {error}", error=str(error))

    def abandon(self, failure: Failure) -> None:
        """This version cannot start: have the keeper end it and go back to the version before."""
        if self._ties is not None:
            self._ties.fail(attempt.reason_of(failure.value)[-attempt.REASON :])
            signal.pause()

    def take(self) -> None:
        """Receive what the node before has left; waits for its end. Call it before anything is opened."""
        self._failed = self._environment.pop(FAILED, "")
        if PATH in self._environment:
            # The next program must find its modules in the usual place, not in the kept copy.
            self._environment["PYTHONPATH"] = self._environment.pop(PATH)
        if self._ties is None:
            return
        self._ties.hello()
        for memory in self._ties.take("state"):
            self._left = read_memory(memory)
        if self._left.HasField("ring"):
            self._house.ring.unpack(self._left.ring)
        if self._failed:
            self._house.store.go_back()

    @property
    def lock(self) -> int | None:
        """The descriptor of the state directory's lock that the node before has left, if any."""
        return next(iter(self._keeper.take("lock")), None)

    @property
    def outcome(self) -> str | None:
        """The outcome of an upgrade: why the next version failed and this one runs again; empty if it succeeded.

        None without an upgrade.
        """
        return self._failed if self._failed or self._left.exact else None

    @property
    def cores(self) -> Collection[int]:
        """The PIDs of the cores that were left."""
        return [run.pid for run in (self._left.run, *self._left.draining) if run.pid]

    def held(self, name: str, interface: str, port: int) -> int | None:
        """The descriptor that the node before has left, if it listens there. The caller owns it."""
        for held in self._keeper.take(_port(name)):
            with socket.socket(fileno=os.dup(held)) as there:
                where = there.getsockname()[:2]
            if where in places(interface, port):
                return held
            os.close(held)
            self._keeper.drop([_port(name)])
        return None

    def hold(self, lock: int) -> None:
        """Have the keeper hold the lock of the state directory, and the ports. Raises `OSError`."""
        self._keeper.put("lock", [lock])
        for name, port in self.ports.items():
            self._keeper.put(_port(name), [port.fileno()])

    def inherit(self) -> None:
        """Have the resume recover the cores that were left; controllers wait until that is done."""
        if self._ties is not None:
            self._ties.follow(self._reactor)
        if self.cores:
            self._leaving.inherit(self._left, self)
            self.listen(False)

    def ready(self, commit: Callable[[], None]) -> None:
        """Note that everything serves. `commit` is called when the way back ends: at once, or with the cores taken."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)
        self._commit, self._ready = commit, True
        if self._failed:
            self._house.refuse(self._failed)
        if not self.cores:
            self._come_up()

    async def end_others(self) -> None:
        if not self._left.exact and self._ties is not None:
            await self._ties.end_others()

    def taken(self, pids: Collection[int]) -> None:
        if not self._ready:
            self.go_back("it does not get ready")
        if pids:
            text = f"txnode {__version__} goes on with {'the core' if len(pids) == 1 else f'{len(pids)} cores'}"
            self._house.ring.event(text)
            self.log.info("{text}", text=text)
        if {*pids} != {*self.cores}:
            self._house.sweep(pids)
        self._come_up()

    def go_back(self, reason: str) -> None:
        """Go back to the version before, if this one follows it in an upgrade: the keeper ends this process then.

        Not if the node is ending, which also cancels what takes over the cores.
        """
        if self._ties is not None and self._left.exact and not self._failed and not self.ending:
            self._ties.fail(f"it cannot go on with the core: {reason}")
            signal.pause()

    def failed(self, reason: str) -> None:
        self.go_back(reason)
        self.log.warn("the core is restarted: {reason}", reason=reason)
        self._house.sweep(())
        self._come_up()

    def end(self) -> None:
        """Note that the node is ending, and all with it."""
        self.ending = True
        if self.snapshots is not None:
            self.snapshots.stop()
        if self._ties is not None:
            self._ties.bye()

    def _come_up(self) -> None:
        if self._ties is not None and self.snapshots is not None:
            # From here on the next node finds what the disk has, not what the node before had counted.
            self.snapshots.go_on(self._left)
            self._ties.drop_leftover()
            self._environment.pop(TRYING, None)
            self._ties.up(self._seconds)
        # Frees memory: it may be large.
        self._left = Handover(exact=self._left.exact)
        if self.ending:
            return
        if self.snapshots is not None:
            self.snapshots.start()
        self._commit()
        self.listen()

    def listen(self, on: bool = True) -> None:
        """Accept new connections of controllers, or let them wait in the backlog."""
        for port in self.ports.values():
            (port.startReading if on else port.stopReading)()


def places(interface: str, port: int) -> Sequence[tuple[Any, ...]]:
    """The addresses that an interface and port resolve to: an operator may give a host name."""
    try:
        found = socket.getaddrinfo(interface, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return [(interface, port)]
    return [address[:2] for *_, address in found]


def _port(name: str) -> str:
    return f"listen/{name}"
