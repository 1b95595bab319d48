"""Orders the operations that change the backend: Starts, Stops, changes of users and of routing.

Each operation sees the users as the operations before it left them. Starting and stopping cores is done by one
operation at a time. A Stop aborts the operations before it; a Start that equals the newest operation joins it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredLock, ensureDeferred

from node.base.errors import Aborted
from node.base.waiting import Signal

T = TypeVar("T")

# An operation calls it when the wanted users are final: the next operation may begin then.
Settled = Callable[[], None]


Work = Callable[[Settled], Coroutine[Any, Any, None]]


class Operation:
    """One operation, waiting or running. Operations with equal `subject` are equal; a `final` one cannot be aborted.

    `replaces`: it replaces everything that an operation of its kind before it does.
    """

    def __init__(self, perform: Work, subject: object, final: bool, replaces: bool) -> None:
        self.perform = perform
        self.subject = subject
        self.replaces = replaces
        # Whether a change of users comes between this operation and the next.
        self.before_user_change = False
        # Whether the operation before this one performs it, and the signal for the end of that.
        self.taken = False
        self.performed = Signal()
        self.settled = Signal()
        self.ended = Signal()
        self.fault: BaseException | None = None
        self.work: Deferred[None] | None = None
        self.aborted = False
        self._final = final

    def abort(self) -> None:
        """Cancel it, but only once: it may have to clean up, and later operations rely on that."""
        if self.work is not None and not self._final and not self.aborted:
            self.aborted = True
            self.work.cancel()


class Control:
    """All operations under way, oldest first."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._core = DeferredLock()
        # The operation that may start or stop cores now.
        self._performing: Operation | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the users of all operations so far are final."""
        return not self._operations or self._operations[-1].settled.fired

    async def settled(self) -> None:
        """Wait until the users of all operations so far are final. For callers that change users."""
        before = self._follow()
        if before is not None:
            self._operations[-1].before_user_change = True
            await before.wait()

    async def quiet(self) -> None:
        """Wait until the users of all operations so far are final. For changes that no controller asked for.

        The next operation begins after that change. Unlike `settled`, a later Start can still join an equal one.
        """
        if self._operations:
            await self._operations[-1].settled.wait()

    async def run(
        self,
        work: Work,
        subject: object = None,
        core: bool = False,
        final: bool = False,
        replaces: bool = False,
    ) -> None:
        """Run `work` in its turn; with `core`, while no other operation starts or stops cores. Raises what it raises.

        With `replaces` it may be done instead of such an operation before it: see `overtaken`. Raises `Aborted` if a
        Stop came meanwhile, unless it is `final`. Cancelling the caller does not cancel the operation.
        """
        newest = self._operations[-1] if self._operations else None
        if newest is None or newest.subject is None or newest.subject != subject:
            newest = self._begin(Operation(work, subject, final, replaces), core)
        await newest.ended.wait()
        if newest.fault is not None:
            raise newest.fault

    def abort(self) -> None:
        """Cancel all operations, newest first, so that none that waits gets its turn."""
        for operation in reversed(list(self._operations)):
            operation.abort()

    async def overtaken(self) -> bool:
        """Perform the next operation now if it replaces the running one. Returns True if the running one is done then.

        If the next one fails before it has changed anything, the running one continues (False). If it fails later, that
        error is raised: users that were changed after it stay changed. An operation performed this way is not
        overtaken itself: else a stream of Starts would keep any of them from running.
        """
        own = self._performing
        place = self._operations.index(own) + 1 if own else 0
        behind = self._operations[place] if 0 < place < len(self._operations) else None
        if own is None or own.taken or own.before_user_change or behind is None or behind.aborted:
            return False
        if not (own.replaces and behind.replaces):
            return False
        behind.taken, self._performing = True, behind
        try:
            await behind.perform(own.settled.fire)
        except CancelledError:
            raise
        except Exception as error:
            behind.fault = error
            if own.settled.fired:
                raise
            return False
        finally:
            self._performing = own
            behind.performed.fire()
        return True

    def _begin(self, operation: Operation, core: bool) -> Operation:
        before = self._follow()
        self._operations.append(operation)
        deferred = ensureDeferred(self._perform(operation, before, core))
        operation.work = deferred
        return operation

    def _follow(self) -> Signal | None:
        """The signal that the newest operation has settled, if there is one. No later operation joins it any more."""
        if not self._operations:
            return None
        self._operations[-1].subject = None
        return self._operations[-1].settled

    async def _perform(
        self,
        operation: Operation,
        before: Signal | None,
        core: bool,
    ) -> None:
        try:
            if before is not None:
                await before.wait()
            if operation.taken:
                operation.settled.fire()
                await operation.performed.wait()
            elif core:
                await self._core.run(self._alone, operation)
            else:
                await operation.perform(operation.settled.fire)
        except Exception as error:  # noqa: BLE001 - raised to every caller that waits for it
            operation.fault = Aborted() if operation.aborted and isinstance(error, CancelledError) else error
        finally:
            self._operations.remove(operation)
            operation.settled.fire()
            operation.ended.fire()

    async def _alone(self, operation: Operation) -> None:
        self._performing = operation
        try:
            await operation.perform(operation.settled.fire)
        finally:
            self._performing = None
