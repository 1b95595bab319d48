"""Runs the one backend: Starts, Stops, and resuming what ran when the node ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from node.backend.backoff import Backoff
from node.backend.context import Context, Worker
from node.backend.control import Settled, Work
from node.backend.desired import Accepted, Desired
from node.backend.faults import answered, as_node_error, in_background
from node.backend.health import lives
from node.backend.listing import Listing
from node.backend.members import Members
from node.backend.options import BackendOptions
from node.backend.routing import Router
from node.backend.starts import Starts, fingerprint_of, prepare
from node.backend.state import State
from node.backend.supervisor import Supervisor
from node.backend.wind_down import WindDown
from node.base.errors import CoreFailed, InvalidConfig, NodeError, NotStarted, ShuttingDown
from node.base.logs import Logger, LogRing
from node.base.reactor import PooledReactor
from node.contract.driver import Driver, Generation
from node.contract.generations import Generations
from node.contract.routing import Routing
from node.events.journal import Journal
from node.events.kinds import Kind
from protos.service_pb2 import Backend

T = TypeVar("T")
Ask = Callable[[Generation], Awaitable[T]]
UNCHANGED = Routing()


class Runner(Worker):
    """Runs at most one backend; `supervisor` follows its cores.

    `users` changes its users, `listing` lists them, `router` changes its routing.
    """

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        ring: LogRing,
        desired: Desired,
        generations: Generations,
        read: Callable[[Generation], Coroutine[Any, Any, bool]],
        options: BackendOptions,
        journal: Journal,
    ) -> None:
        """`read` reads and books the counters of a run."""
        context = Context(reactor, ring, desired, generations, options, journal)
        super().__init__(context)
        self.generations = generations
        self.journal = journal
        self.status = context.status
        self.desired = desired
        self.supervisor = Supervisor(context, WindDown(reactor, generations, read, journal))
        self._settling = self.supervisor.settling
        self.users = Members(context, self._settling)
        self.listing = Listing(context, self._settling)
        self.router = Router(context, self._settling)
        self._resuming = Backoff(reactor)
        self._starts = Starts(context, self.supervisor, self._resuming)
        self._closed = False

    async def start(self, driver: Driver, request: Backend) -> None:
        """Run a backend. If an equal one runs already it goes on, with these users; no connection ends."""

        async def work(settled: Settled) -> None:
            if self._closed:
                raise ShuttingDown
            await self._starts.start(driver, request, settled, UNCHANGED)
            self._settling.require_out()

        try:
            await answered(self._reactor, self._control.run(work, request, core=True, replaces=True), "the Start")
        except InvalidConfig as error:
            self.journal.tell(Kind.CONFIG_REFUSED, error.text, reason=error.text)
            raise
        await self.desired.recorder.kept()

    async def prepare(
        self, driver: Driver, request: Backend, users: Sequence[bytes], routing: Routing = UNCHANGED
    ) -> None:
        """Prepare the resume of a saved backend while another node still runs it. Raises as `Driver.prepare`."""
        fingerprint = await fingerprint_of(self._reactor, driver, request)
        accepted = await prepare(driver, request, fingerprint, routing)
        await self.desired.build_ahead(accepted.plan, users)

    async def resume(
        self,
        driver: Driver,
        request: Backend,
        users: Sequence[bytes],
        resumed: Callable[[], None],
        routing: Routing = UNCHANGED,
    ) -> None:
        """Run what ran when the node ended. If it does not start it is retried as after a crash.

        `users`: its saved users; `routing`: its routing changes. `resumed` is called when it runs, now or later; not if
        a controller was faster.
        """

        async def work(_: Settled) -> None:
            # Changes of users wait for the outcome: applied before, one would be lost with a failed try, and the next
            # try would bring back removed users.
            if self.desired.accepted is not None or self._closed:
                return  # a controller was faster, or the node ends
            self.status.enter(State.STARTING, "resuming what ran when the node ended")
            try:
                await self._starts.start(driver, request, _never_settled, routing, users)
            except Exception as error:
                if self.status.stopped:
                    raise  # a Stop aborted it
                self._not_resumed(as_node_error(error), work)
            else:
                resumed()

        await self._control.run(work, core=True)

    async def stop(self, reason: str, grace: float = 0.0) -> None:
        """Stop the backend and abort all operations. Its core ends after `grace` seconds, unless a Start wants it.

        For controllers the backend is stopped at once; the caller waits for the core's end, but not longer than for any
        other call.
        """
        try:
            await answered(self._reactor, self._stop_now(reason, grace), "stopping the core")
        except CoreFailed as error:
            self.log.warn("{reason}", reason=error.text)

    async def _stop_now(self, reason: str, grace: float = 0.0) -> None:
        self.supervisor.rest()
        self._resuming.cancel()
        # Before the others are aborted: their callers must find the backend stopped.
        if not self.status.stopped:
            self.status.enter(State.STOPPED, reason)
        if not self._closed:
            self.desired.recorder.forget()
        self._control.abort()
        await self._control.run(lambda settled: self._starts.stop(grace, settled), core=True, final=True)
        await self.desired.recorder.kept()

    async def exchange(
        self, core: str, use: Callable[[], None], back: Callable[[], None], due: Callable[[Generation], bool]
    ) -> bool:
        """Run the accepted backend with other files of this core: `use` switches plans to them, `back` undoes that.

        The core first parses the configuration with the new files; until it accepts it nothing changes. Returns whether
        a new run has taken over: not if none runs, or the current one is not `due`. On failure calls `back` and raises;
        what ran goes on then, or is restarted.
        """
        took: list[bool] = []

        async def work(settled: Settled) -> None:
            accepted = self.accepted
            use()
            try:
                runs = accepted is not None and accepted.driver.name == core
                took.append(accepted is not None and runs and await self._starts.exchange(accepted, due, settled))
            except BaseException:
                back()
                raise

        await self._control.run(work, core=True)
        await self.desired.recorder.kept()
        return took[0]

    async def plan_again(self, request: bytes, routing: Routing) -> Accepted:
        """Prepare the backend of a handed-over run again; without a `request` it is the one accepted now.

        Raises as `node.backend.starts.prepare`.
        """
        accepted = self.desired.accepted
        assert accepted is not None
        if request:
            asked = Backend.FromString(request)
            fingerprint = await fingerprint_of(self._reactor, accepted.driver, asked)
            if fingerprint != accepted.fingerprint:
                return await prepare(accepted.driver, asked, fingerprint, routing)
        return accepted if accepted.routing == routing else await accepted.with_routing(routing)

    def unsteady(self) -> str:
        """Why the runs cannot be handed over to the next node process now; empty if they can."""
        if self.supervisor.ending:
            return "a core is ending"
        if self.generations.draining and self.status.stopped:
            return "a stopped core waits for its Start (STOP_GRACE)"
        if self.status.awaited:
            return f"the backend is {self.status.state}"
        return ""

    async def leave(self, then: Callable[[], Awaitable[None]]) -> None:
        """Do `then` while no run starts or ends: other operations wait until it is done."""

        async def work(_: Settled) -> None:
            self.supervisor.pause()
            try:
                await self._settling.idle()
                await then()
            finally:
                self.supervisor.pause(False)

        await self._control.run(work, core=True)

    def report_users(self) -> None:
        """Report the events of users that were collected."""
        self._events.close()

    async def close(self) -> None:
        """Stop the core for the end of the node. The saved backend stays: the next node resumes it."""
        self._closed = True
        try:
            await self._stop_now("the node is shutting down")
        finally:
            self._events.close()

    def current(self) -> Generation:
        """The run to query; during a Start the one that still serves.

        Raises as `Status.require`, and `NotStarted` while the core is restarted to apply users.
        """
        run = self.generations.current
        if run is not None and self.status.state is State.STARTING:
            return run
        self.status.require()
        if run is None:
            raise NotStarted("the core is being restarted to apply users")
        return run

    async def ask(self, ask: Ask[T]) -> T:
        """Ask the current run; if it ends meanwhile, the next one. Raises as `current`, and what `ask` raises."""
        while True:
            run = self.current()
            for answer in (await self._asked(run, ask, lambda: [self._generations.current])).values():
                return answer

    async def ask_all(self, ask: Ask[T]) -> list[T]:
        """Ask every run that may have users' connections. Raises as `ask`."""
        answers: dict[Generation, T] = {}
        while self.current() not in answers:
            for run in self._generations.serving:
                if run not in answers:
                    answers.update(await self._asked(run, ask, lambda: self._generations.serving))
        return list(answers.values())

    async def _asked(
        self, run: Generation, ask: Ask[T], asked: Callable[[], Collection[Generation | None]]
    ) -> Mapping[Generation, T]:
        """The run's answer; empty if it failed and is not among the runs in `asked` any more."""
        try:
            return {run: await ask(run)}
        except CoreFailed:
            if run in asked():
                # A core that was killed may not be known to be gone yet.
                await lives(run, self._reactor)
            if run in asked():
                raise
            return {}

    @property
    def accepted(self) -> Accepted | None:
        """The backend accepted last; None if it was stopped."""
        return None if self.status.stopped else self.desired.accepted

    @property
    def warnings(self) -> list[str]:
        """Warnings of the configuration, of the supervisor, and of the current run."""
        plan = self.accepted.plan.warnings if self.accepted else ()
        run = self.generations.current.warnings if self.accepted and self.generations.current else ()
        return [*plan, *self.supervisor.warnings, *run]

    def _not_resumed(self, reason: NodeError, again: Work) -> None:
        """Note why the resume failed, and try again, with backoff, unless the configuration is invalid."""
        if isinstance(reason, InvalidConfig):
            self.status.enter(State.FAILED, f"not resumed: {reason.text}")
            return
        self.status.enter(State.FAILED, f"not resumed: {reason.text}; the node tries again")
        text = "the backend could not be resumed"
        self._resuming.later(lambda: in_background(self._control.run(again, core=True), text))


def _never_settled() -> None:
    """Do nothing: the users are final only when the resume has ended."""
