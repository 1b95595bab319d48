"""The base class of the generations of both drivers: what it gives the node for limits, counters and hand-overs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from drivers.process import readiness as starting
from drivers.process.channel import COUNTERS, asking
from drivers.process.child import CoreProcess
from drivers.process.executable import Files
from drivers.process.kept import ANSWER, silent
from drivers.process.paced import Paced, PacedRun
from drivers.process.shared import A, Listening, SharedRun, watch
from drivers.sockets.core_connections import CoreConnections
from drivers.sockets.sharing import Sharing
from node.base.errors import CoreFailed
from node.contract.accounts import Accounts
from node.contract.connections import Arrived, Live
from node.contract.counters import Asked, Reading, Scope, Seen
from node.contract.driver import Host


@dataclass(frozen=True)
class Started(Generic[A]):
    """A core's process with its API, and the `files` that it read when it started. `sharing` gets to know its end."""

    host: Host
    sharing: Sharing
    process: CoreProcess
    api: A
    files: Files

    def __post_init__(self) -> None:
        watch(self.process, self.sharing)

    async def ready(
        self,
        listens: Callable[[], bool],
        seconds: float,
        is_refusal: Callable[[CoreProcess], bool],
        cause: Callable[[Sequence[str]], str],
    ) -> None:
        """Wait until the core answers; `listens` is a cheap check before each call. Raises as `readiness.ready`.

        Then the process has ended, and the API is closed.
        """

        async def answers() -> bool:
            return listens() and await self.api.ready(starting.CALL)

        try:
            await starting.ready(self.host.reactor, self.process, answers, seconds, is_refusal, cause)
        except BaseException:
            await self.api.close()
            raise

    async def require_answer(self) -> None:
        """Raises `Gone` if a recovered core does not answer."""
        if not await self.api.ready(ANSWER):
            raise silent(self.process)


class CoreGeneration(SharedRun[A], PacedRun):
    """Satisfies the parts of `Shares`, `Paces`, `CountsSome` and `Leaves` that are the same for all cores."""

    accounts: dict[str, Accounts]

    def __init__(
        self,
        started: Started[A],
        listening: Listening,
        connections: CoreConnections,
        paced: Paced,
        own_paths: Collection[str] = (),
    ) -> None:
        super().__init__(
            started.host,
            started.process,
            started.api,
            sharing=started.sharing,
            listening=listening,
            own_paths=own_paths,
        )
        self._files = started.files
        self._connections = connections
        self._paced = paced

    @property
    def outdated(self) -> bool:
        return bool(self._files.warnings)

    @property
    def arrived(self) -> Arrived:
        return self._connections.arrived

    @arrived.setter
    def arrived(self, arrived: Arrived) -> None:
        self._connections.announce_to(arrived)

    async def look(self, keys: Collection[str]) -> list[Live]:
        try:
            return await self._connections.look(keys)
        except OSError as error:
            raise CoreFailed(f"the kernel does not list connections: {error}") from error

    async def end(self, connections: Iterable[Live]) -> int:
        return await self._connections.reset([live.handle for live in connections])

    async def counters(self, seen: Seen | None = None) -> Reading:
        raise NotImplementedError

    async def some_counters(self, wanted: Iterable[Asked]) -> Reading:
        """Read these counters; all, if the core may count one by a name that the node no longer knows."""
        scopes, names = set[Scope](), set[tuple[Scope, str]]()
        for scope, name in wanted:
            if name is None:
                scopes.add(scope)
                continue
            counted = self._counted_as(scope, name)
            if not counted:
                return await self.counters()
            names |= {(scope, spelling) for spelling in counted}
        with asking(COUNTERS):
            return await self._some_counters(scopes, names)

    def _counted_as(self, scope: Scope, name: str) -> Collection[str]:
        """The names by which the core may count this user, inbound or outbound; none if they are not known."""
        raise NotImplementedError

    async def _some_counters(self, scopes: Collection[Scope], names: Collection[tuple[Scope, str]]) -> Reading:
        """Read the counters of these scopes, and of these names of the core. Raises `ApiFailed`."""
        raise NotImplementedError

    async def leave(self) -> None:
        self._process.leave()

    def stay(self) -> None:
        self._process.stay()
