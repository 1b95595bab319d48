"""Runs again what ran when the node before ended."""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.backend.runner import Runner
from node.base.errors import Aborted
from node.base.logs import Logger
from node.contract.driver import Driver, type_name
from node.contract.routing import Routing
from node.contract.saved import Lasting, Saved
from node.engine.keep_alive import KeepAlive
from node.engine.leaving import Leaving
from protos.service_pb2 import Backend

# Seconds between two looks whether the cores that were left are still wanted.
HEIR = 0.5


class Resume(Lasting):
    """Starts the saved backend again, with its users and its remaining keep-alive, before any controller calls.

    Not `enabled`: only to go on with cores that the node before has left.
    """

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        runner: Runner,
        drivers: Mapping[int, Driver],
        keep_alive: KeepAlive,
        leaving: Leaving,
        enabled: bool,
    ) -> None:
        self._reactor = reactor
        self._runner = runner
        self._drivers = drivers
        self._keep_alive = keep_alive
        self._leaving = leaving
        self._enabled = enabled
        self._saved: Saved | None = None
        self._begun = False

    def restore(self, saved: Saved) -> None:
        self._saved = saved
        if self._begun:
            self.begin()

    def begin(self) -> None:
        """Resume what was saved. What is read late, because of the disk, is resumed when it has been read."""
        self._begun = True
        saved, self._saved = self._saved or Saved(), None
        if not self._runner.desired.loaded(saved) or not saved.request:
            self._require_heir()
            return
        self._leaving.booked = saved.booked
        self._keep_alive.restore_left(saved.left)
        if self._enabled or self._leaving.inherits:
            resuming = ensureDeferred(self._resume(saved)).addErrback(self._not_resumed)
            resuming.addCallback(lambda _: self._require_heir())

    def _require_heir(self) -> None:
        if self._runner.status.awaited:
            # A failed resume is tried again, and may still take the core over.
            self._reactor.callLater(HEIR, self._require_heir)
            return
        ensureDeferred(self._leaving.require_heir()).addErrback(self._not_resumed)

    async def _resume(self, saved: Saved) -> None:
        request = Backend.FromString(saved.request)
        driver = self._drivers.get(request.type)
        if driver is None:
            kind = type_name(request.type)
            self.log.error("the last backend cannot be resumed: this node has no core of type {type}", type=kind)
            return

        def resumed() -> None:
            self._keep_alive.resumed(saved.left)

        await self._runner.resume(driver, request, saved.users, resumed, Routing.unpack(saved.routing))

    def _not_resumed(self, failure: Failure) -> None:
        if not failure.check(Aborted):  # a Stop, or the node's end
            self.log.failure("the last backend could not be resumed; `nodectl info` shows its state", failure)
