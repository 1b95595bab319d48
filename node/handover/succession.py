"""Starts the next version beside this one, and leaves everything to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial

from twisted.internet.defer import CancelledError, Deferred

from node import __version__
from node.base.errors import Aborted
from node.base.logs import Logger
from node.base.reactor import PooledReactor
from node.base.slices import a_turn
from node.base.waiting import finished
from node.contract.leaving import NotNow
from node.engine.leaving import Leaving
from node.events.kinds import Kind
from node.handover import attempt
from node.handover.arrival import Arrival
from node.handover.house import House
from node.handover.program import PATIENCE, Program, Refused
from node.handover.snapshots import FORMAT, memory_of
from node.handover.ties import Ties
from protos.handover_pb2 import Handover

# The exit status if the next version could not be left all.
FAILURE = 1
# Turns of the reactor in which a signal received already can still end the node.
TURNS = 3


class Succession:
    """Leaves everything to the next version; without `ties` there is no keeper, and none follows in place."""

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        environment: Mapping[str, str],
        ties: Ties | None,
        arrival: Arrival,
        leaving: Leaving,
        house: House,
    ) -> None:
        self._reactor = reactor
        self._environment = environment
        self._ties = ties
        self._arrival = arrival
        self._leaving = leaving
        self._house = house
        # Whether so much is closed that this version cannot go on.
        self._closed = False
        # Why the next version failed after it had been ready.
        self._late = ""

    @property
    def unsteady(self) -> str:
        """Why the node cannot be handed over now; empty if it can."""
        if self._ties is None:
            return ""
        return "the node is ending" if self._arrival.ending else self._house.parts.unsteady

    async def succeed(self, program: Program, version: str) -> str:
        """Leave everything to that version, and end. Returns only if that is not possible now, with the reason.

        Raises `NodeError` if that version fails, or if a core could not go on with its configuration.
        """
        if self._ties is None:
            raise Refused("the node has no keeper (KEEPER=off): restart it to change its version")
        await self._leaving.rehearse()
        # Written again, so that a disk that has failed since the last change is noticed.
        self._house.store.event(self._house.journal.margins)
        await self._house.store.flush()
        if self._house.store.fault:
            return self._house.store.fault
        await self._start_next(self._ties, program)
        reason = "the node goes on"
        try:
            self._house.parts.admit(False)
            await self._house.parts.finish()
            await self._leaving.leave(partial(self._leave, self._ties, version))
            if not self._closed:
                # No run was handed over: none runs, or its driver cannot hand it over.
                self._require_steady()
                self._closed = True
                await self._leaving.shut_down()
                await self._leave(self._ties, version, Handover())
        except Exception as error:
            if self._closed and not self._arrival.ending:
                text = "the node exits with status {status}: the next version could not be left all: {error}"
                self.log.critical(text, status=FAILURE, error=str(error))
                os._exit(FAILURE)
            # This version goes on in any case.
            self._house.parts.admit(True)
            reason = str(error)
            if isinstance(error, (NotNow, Aborted)):
                return reason
            raise
        finally:
            self._ties.cancel_next(reason)
        return ""

    def refuse(self, reason: str) -> None:
        self._house.refuse(reason)

    async def _start_next(self, ties: Ties, program: Program) -> None:
        """Start the next version, which imports its modules while this one serves. Raises `Refused` if it fails."""
        started: Deferred[str] = Deferred()
        self._late = ""

        def said(reason: str) -> None:
            if started.called:
                self._late = reason
            else:
                started.callback(reason)

        back = program.back(self._environment)
        ties.start_next(({}, program.beside(attempt.__file__)), ({}, program.next), back, PATIENCE, said)
        if reason := await started:
            raise Refused(f"the next version did not start: {reason}")

    def _require_steady(self) -> None:
        """Raise `NotNow` if the node cannot be left any more."""
        if self.unsteady:
            raise NotNow(self.unsteady)
        if self._late:
            raise NotNow(f"the next version has failed: {self._late}")

    async def _leave(self, ties: Ties, version: str, runs: Handover) -> None:
        self._require_steady()
        self._house.report(Kind.NODE_UPGRADING, f"upgrading the node to {version}", version=version)
        self._closed = True
        if self._arrival.snapshots is not None:
            self._arrival.snapshots.stop()
        try:
            await finished(self._close_and_leave(ties, runs))
        except CancelledError:
            # The node's end cancels operations on cores, this one included; the closing continues all the same.
            if not self._arrival.ending:
                raise

    async def _close_and_leave(self, ties: Ties, runs: Handover) -> None:
        house = self._house
        await house.parts.leave()
        handover = Handover(format=FORMAT, version=__version__, ring=house.ring.packed, exact=True)
        handover.MergeFrom(runs)
        house.systemd.reloading()
        for _ in range(TURNS):
            await a_turn(self._reactor)
        if self._arrival.ending:
            return  # a signal asked the node to end
        ties.put("state", [memory_of(handover.SerializeToString())])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)
