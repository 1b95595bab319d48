"""The order in which control happens.

Every operation that changes the backend sees what those before it made of the users. Starts and stops of the core go
one at a time, too. A Stop aborts what came before it; a Start that is equal to the newest operation joins it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredLock, ensureDeferred

from node.errors import Aborted
from node.waiting import Signal

T = TypeVar("T")

# Calls it when the operation has settled which users there are to be; what comes after it need not wait for more.
Settled = Callable[[], None]


class Operation:
    """One operation under way. `subject` is what an equal one is told by; a `final` one cannot be aborted."""

    def __init__(self, subject: object, final: bool) -> None:
        self.subject = subject
        self.settled = Signal()
        self.ended = Signal()
        self.fault: BaseException | None = None
        self.work: Deferred[None] | None = None
        self.aborted = False
        self._final = final

    def abort(self) -> None:
        """End it. Once: it may have to clear up, and what comes after it relies on that."""
        if self.work is not None and not self._final and not self.aborted:
            self.aborted = True
            self.work.cancel()


class Control:
    """All operations under way, oldest first."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._core = DeferredLock()

    async def settled(self) -> None:
        """Wait until all that came before has settled its users: for callers that change them."""
        before = self._follow()
        if before is not None:
            await before.wait()

    async def quiet(self) -> None:
        """Wait until all that came before has settled its users, for a change of them that no controller asked for.

        What comes next begins behind that change. Other than `settled` it parts nothing that is asked for alike.
        """
        if self._operations:
            await self._operations[-1].settled.wait()

    async def run(
        self,
        work: Callable[[Settled], Coroutine[Any, Any, None]],
        subject: object = None,
        core: bool = False,
        final: bool = False,
    ) -> None:
        """Run `work` in its turn; with `core` it is alone in starting and stopping cores. Raises what it raises.

        Raises `Aborted` if a Stop came meanwhile, unless it is `final`. A caller who hangs up cancels nothing.
        """
        newest = self._operations[-1] if self._operations else None
        if newest is None or newest.subject is None or newest.subject != subject:
            newest = self._begin(work, Operation(subject, final), core)
        await newest.ended.wait()
        if newest.fault is not None:
            raise newest.fault

    def abort(self) -> None:
        """End all that is under way, the newest first: what waits for its turn must not get it."""
        for operation in reversed(list(self._operations)):
            operation.abort()

    def _begin(
        self, work: Callable[[Settled], Coroutine[Any, Any, None]], operation: Operation, core: bool
    ) -> Operation:
        before = self._follow()
        self._operations.append(operation)
        deferred = ensureDeferred(self._perform(operation, before, work, core))
        operation.work = deferred
        return operation

    def _follow(self) -> Signal | None:
        """What settles the newest operation, if there is one. Nothing joins it across what comes next."""
        if not self._operations:
            return None
        self._operations[-1].subject = None
        return self._operations[-1].settled

    async def _perform(
        self,
        operation: Operation,
        before: Signal | None,
        work: Callable[[Settled], Coroutine[Any, Any, None]],
        core: bool,
    ) -> None:
        try:
            if before is not None:
                await before.wait()
            if core:
                await self._core.run(work, operation.settled.fire)
            else:
                await work(operation.settled.fire)
        except Exception as error:  # noqa: BLE001 - raised to everybody who waits for it
            operation.fault = Aborted() if operation.aborted and isinstance(error, CancelledError) else error
        finally:
            self._operations.remove(operation)
            operation.settled.fire()
            operation.ended.fire()
