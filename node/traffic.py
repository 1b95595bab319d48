"""Bytes: readings of the generations' counters into the ledger, and the rows that controllers ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from drivers.interface import Generation
from node.errors import InvalidRequest, NodeError, UnknownName, Unsupported
from node.ledger import DIRECTIONS, Counter, Ledger, Scope
from protos import service_pb2
from protos.service_pb2 import Stat, StatRequest, StatResponse

_ALL = {
    service_pb2.Outbounds: Scope.OUTBOUND,
    service_pb2.Inbounds: Scope.INBOUND,
    service_pb2.UsersStat: Scope.USER,
}
_ONE = {
    service_pb2.Outbound: Scope.OUTBOUND,
    service_pb2.Inbound: Scope.INBOUND,
    service_pb2.UserStat: Scope.USER,
}


class Traffic:
    """What was counted and not yet taken."""

    log = Logger()

    def __init__(self, generations: Callable[[], Sequence[Generation]], is_user: Callable[[str], bool]) -> None:
        self._generations = generations
        self._is_user = is_user
        self._ledger = Ledger()
        self._turn = DeferredLock()

    async def read(self) -> None:
        """Book what every generation has counted by now. One that does not answer is logged and read the next time."""
        await self._turn.run(self._read)

    async def stats(self, request: StatRequest) -> StatResponse:
        """The rows of a request, from the ledger. Raises `UnknownName`."""
        await self.read()
        rows = self._rows(request)
        if request.reset:
            self._ledger.take(counter for counter, _ in rows)
        return StatResponse(stats=[self._stat(counter, value) for counter, value in rows])

    async def _read(self) -> None:
        generations = list(self._generations())
        self._ledger.keep(generations)
        for generation in generations:
            try:
                self._ledger.book(generation, await generation.counters())
            except NodeError as fault:
                self.log.warn("counters were not read: {reason}", reason=fault.text)

    def _rows(self, request: StatRequest) -> list[tuple[Counter, int]]:
        if request.type in _ALL:
            self._require(_ALL[request.type])
            return self._ledger.all(_ALL[request.type])
        if request.type not in _ONE:
            raise InvalidRequest(f"there is no kind of statistics with number {request.type}")
        scope = _ONE[request.type]
        self._require(scope)
        rows = self._ledger.one(scope, request.name)
        if rows is None and scope is Scope.USER and self._is_user(request.name):
            rows = [(Counter(scope, request.name, direction), 0) for direction in DIRECTIONS]
        if rows is None:
            raise UnknownName(f"there is no {scope.value} {request.name!r}")
        return rows

    def _require(self, scope: Scope) -> None:
        if any(scope in generation.uncounted for generation in self._generations()):
            raise Unsupported(
                f"this core cannot count {scope.value}s with this configuration: see the warnings of info"
            )

    def _stat(self, counter: Counter, value: int) -> Stat:
        return Stat(name=self._ledger.spelled(counter), type=counter.direction, link="traffic", value=value)
