"""Bytes: readings of the generations' counters into the ledger, and the rows that controllers ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Protocol

from twisted.internet.defer import Deferred, TimeoutError, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.contract.counters import Reading, Row, Scope
from node.contract.driver import CountsSome, Generation
from node.errors import InvalidRequest, NodeError, UnknownName, Unsupported, shown
from node.logs import Logger
from node.periodic import Periodic
from node.state.store import Store
from node.traffic.ledger import Ledger, Taken
from node.traffic.readings import Readings, Wanted
from node.traffic.reply import Told, packed
from node.traffic.sums import Sums
from node.traffic.totals import OTHERS, Totals
from node.waiting import lasting
from protos import service_pb2
from protos.columns_pb2 import Stats
from protos.service_pb2 import StatRequest

# How often the node looks whether a reading is due, as a part of the interval: who asks has one made as well.
TICK = 0.1
# The part of it for which a reading is good enough for figures.
FRESH = 0.1
# Counters are booked, and rows told, in parts of this many (2 to 3 ms), between which other work is done.
SLICE = 2000

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


class Counting(Protocol):
    """The runs of cores whose counters are to be read, ending ones included."""

    @property
    def counting(self) -> Sequence[Generation]: ...


class Limits(Protocol):
    """Who looks at what users carry: see `node.limits`."""

    def booked(self, moved: Sums) -> None:
        """Users have carried this, by key."""

    def saving(self, keys: Collection[str]) -> None:
        """What these users have is being noted, all of it together."""


class Traffic:
    """What was counted and not yet delivered. `interval` is the seconds between two readings that nobody asked for."""

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        generations: Counting,
        is_user: Callable[[str], bool],
        store: Store,
        interval: float,
        totals: Totals | None = None,
    ) -> None:
        self._reactor = reactor
        self._generations = generations
        self._is_user = is_user
        self._store = store
        self._interval = interval
        self._ledger = Ledger(totals)
        self._limits: Limits | None = None
        self._readings = Readings(reactor, self._read_one)
        self._poll = Periodic("reading and noting the counters", self._tick, interval * TICK, reactor)
        # Why the last reading of a generation brought nothing.
        self._faults: dict[Generation, str] = {}
        self._read_at = self._saved_at = float("-inf")
        # The runs that another node may go on with, and their marks.
        self._lasting: dict[Generation, str] = {}
        # Those that are told.
        self._sums: Mapping[Scope, Sequence[Row]] = {}
        # When the last reading began that brought the counters of every run.
        self._whole_at = reactor.seconds()

    @property
    def warnings(self) -> list[str]:
        """What an operator should know about the counting."""
        return [self._faults[run] for run in self._generations.counting if run in self._faults] + self._poll.warnings

    @property
    def age(self) -> float:
        """How old the oldest counters are, in seconds: 0 where none run, long where a core does not answer."""
        return self._reactor.seconds() - self._whole_at if self._generations.counting else 0.0

    @property
    def pending(self) -> Mapping[Scope, int]:
        """How many rows of each scope there are in the ledger."""
        return self._ledger.sizes

    def totals(self, scope: Scope) -> Iterator[Row]:
        """The sums since ever, as of the last `settled`; may be gone through in another thread, for there may be many.

        Users who are none any more are left out.
        """
        rows = self._sums.get(scope, ())
        return (row for row in rows if scope is not Scope.USER or row.key == OTHERS or self._is_user(row.key))

    def watched(self, limits: Limits) -> None:
        """Tell this one of what users carry from now on."""
        self._limits = limits
        self._ledger.booked = limits.booked

    def known(self, run: Generation) -> Mapping[str, int]:
        """The counters of a run that are booked."""
        return self._ledger.known(run)

    def go_on(self, run: Generation, known: Mapping[str, int]) -> None:
        """An earlier program of the node has booked these counters of a run."""
        self._ledger.go_on(run, known)

    def begin(self, rows: Iterable[Row]) -> None:
        """Go on from the rows of an earlier node, and read the counters from now on."""
        self.restore(rows)
        self._poll.start()

    def restore(self, rows: Iterable[Row], totals: Iterable[Row] = ()) -> None:
        """Nobody has had these rows of an earlier node, and these are its sums."""
        self._ledger.restore(rows)
        self._ledger.totals.restore(totals)

    def end(self) -> None:
        """Read no more by itself."""
        self._poll.stop()
        self._note(self._ledger.changes())
        self._store.totals(self._ledger.totals.changes())

    async def last(self, runs: Mapping[Generation, str]) -> None:
        """What is noted of these runs' counters from now on is noted with their marks: another node may need it.

        Returns when what is known of them now is on disk, or the disk has failed.
        """
        new = {run: mark for run, mark in runs.items() if run not in self._lasting}
        self._lasting = dict(runs)
        if new:
            # With the rows that have them.
            self.save()
        for run, mark in new.items():
            self._store.booked(mark, self._ledger.known(run))
        await self._store.flush()

    def last_only(self) -> None:
        """Nobody goes on with any other run."""
        self._store.booked_only(frozenset(self._lasting.values()))

    @property
    def booked(self) -> dict[str, dict[str, int]]:
        """All counters of those runs that are booked, by their marks, for a store that has none of them."""
        return {mark: dict(self._ledger.known(run)) for run, mark in self._lasting.items()}

    async def settled(self, patience: float) -> None:
        """Have `totals` tell of now, what is on disk: it must not go back when the node is killed.

        A core that hangs, and a disk, are waited for so many seconds each at most; the last known sums stand then.
        """
        for work in (self._refresh, self._keep):
            try:
                await ensureDeferred(work()).addTimeout(patience, self._reactor)
            except TimeoutError:
                self.log.debug("sums are told as they were known last")

    async def _refresh(self) -> None:
        if self._reactor.seconds() - self._read_at >= FRESH * self._interval:
            await self.read()

    async def _keep(self) -> None:
        while sums := self._ledger.totals.changes(SLICE):
            self._store.totals(sums)
            await self._breathe(sums)
        # All of this is with the store; what is booked from here on is not.
        told = {scope: self._ledger.totals.all(scope) for scope in Scope}
        await self._store.flush()
        self._sums = told

    async def read(self, generation: Generation | None = None, wanted: Wanted = None) -> bool:
        """Book what one run of a core, or each, has counted by now; whether there may be more. `wanted`: of some names.

        That is so if there was anything, and where a run did not answer, which is logged, or is slow to. A reading is
        booked whole, also where its caller gives up meanwhile.
        """
        began, counting = self._reactor.seconds(), self._generations.counting
        # What is under way may be of one that is gone from among them meanwhile.
        self._ledger.keep({*counting, *self._readings.under_way, *filter(None, (generation,))})
        self._faults = {run: fault for run, fault in self._faults.items() if run in counting}
        if generation is not None:
            return await self._readings.one(generation)
        return await lasting(ensureDeferred(self._read_all(counting, began, wanted)))

    async def stats(self, request: StatRequest, delivered: Callable[[], Deferred[bool]]) -> Stats:
        """The rows of a request, as a StatResponse has them: all that was counted until it came.

        With a reset they come back if the reply is not delivered.
        `delivered` is asked for where that matters. Raises `UnknownName`.
        """
        scope, name = asked(request)
        await self.read(wanted=None if name is None else frozenset({(scope, name)}))
        self._require(scope)
        rows = self._ledger.listed(scope) if name is None else iter([self._row(scope, name)[1:]])
        if request.reset:
            delivered().addCallback(partial(self._settle, self._ledger.take(scope, name)))
        # Among all users only what is not zero is told.
        return await self._told(rows, zeros=name is not None or scope is not Scope.USER)

    def everything(self) -> tuple[list[Row], list[Row]]:
        """All rows that are not yet delivered and all sums, for a store that has none of them."""
        return self._ledger.everything(), self._ledger.totals.everything()

    def save(self) -> None:
        """Have the store note what changed, in parts."""
        self._saved_at = self._reactor.seconds()
        rows = self._ledger.changes(SLICE)
        self._note(rows)
        self._ledger.totals.make_room(Scope.USER, self._is_user)
        sums = self._ledger.totals.changes(SLICE)
        self._store.totals(sums)
        if SLICE in (len(rows), len(sums)):
            self._reactor.callLater(0, self.save)

    def _note(self, rows: Sequence[Row]) -> None:
        self._store.rows(rows)
        if rows:
            for run, mark in self._lasting.items():
                self._store.booked(mark, self._ledger.counters(run, rows))
        if self._limits is not None:
            self._limits.saving([row.key for row in rows if row.scope is Scope.USER])

    def _settle(self, taken: Taken, delivered: bool) -> None:
        self._ledger.settle(taken, delivered)
        if delivered:
            # At once: what was delivered must not come back after a crash.
            self.save()

    async def _tick(self) -> None:
        now = self._reactor.seconds()
        # A tick that comes a little early is as good.
        due = self._interval * (1 - TICK / 2)
        if not self._generations.counting:
            self._whole_at = now
        elif now - self._read_at > due:
            await self.read()
        if now - self._saved_at > due:
            self.save()

    async def _read_all(self, counting: Sequence[Generation], began: float, wanted: Wanted) -> bool:
        moved = await self._readings.all(counting, wanted)
        if wanted is None:
            self._read_at = began
            silent = {*self._faults, *self._readings.under_way}
            self._whole_at = began if silent.isdisjoint(counting) else self._whole_at
        return moved

    async def _read_one(self, generation: Generation, wanted: Wanted) -> bool:
        try:
            moved = await self._book(generation, await counted(generation, wanted))
        except Exception as error:  # noqa: BLE001 - logged, told by `info`; replies have what was read before
            # What could not be read of one that is gone does not matter any more.
            if generation in self._generations.counting:
                self._faults[generation] = self._not_read(error, self._faults.get(generation, ""))
            return True
        self._faults.pop(generation, None)
        return moved

    def _not_read(self, fault: Exception, before: str) -> str:
        """The warning; it is logged if it is another than before."""
        foreseen = isinstance(fault, NodeError)
        text = f"counters were not read: {fault if foreseen else f'internal error: {type(fault).__name__}'}"
        if text != before and foreseen:
            self.log.warn("{text}", text=text)
        elif text != before:
            self.log.failure("counters were not read")
        return text

    async def _book(self, generation: Generation, reading: Reading) -> bool:
        counters, moved = iter(reading.items()), False
        while part := dict(islice(counters, SLICE)):
            moved |= self._ledger.book(generation, part)
            await self._breathe(part)
        return moved

    async def _told(self, rows: Iterator[Told], zeros: bool) -> Stats:
        reply = Stats()
        while part := list(islice(rows, SLICE)):
            reply.stat.extend(packed(part, zeros))
            await self._breathe(part)
        return reply

    async def _breathe(self, part: Sized) -> None:
        """Let others work before the next part, if there may be one."""
        if len(part) == SLICE:
            await deferLater(self._reactor, 0)

    def _row(self, scope: Scope, name: str) -> Row:
        row = self._ledger.one(scope, name)
        if row is None and scope is Scope.USER and self._is_user(name):
            row = Row(scope, name, 0, 0)
        if row is None:
            raise UnknownName(f"there is no {scope.value} {shown(name)}")
        return row

    def _require(self, scope: Scope) -> None:
        # The newest: what is of another configuration and drains is over soon.
        if any(scope in generation.uncounted for generation in self._generations.counting[:1]):
            raise Unsupported(
                f"this core cannot count {scope.value}s with this configuration: see the warnings of info"
            )


async def counted(generation: Generation, wanted: Wanted) -> Reading:
    """All counters of a run, or at least those that are wanted. Raises `errors.CoreFailed`."""
    if wanted is None or not isinstance(generation, CountsSome):
        return await generation.counters()
    return await generation.some_counters(wanted)


def asked(request: StatRequest) -> tuple[Scope, str | None]:
    """Of what scope, and which name of it; None for all. Raises `InvalidRequest`."""
    if request.type in _ALL:
        return _ALL[request.type], None
    if request.type in _ONE:
        return _ONE[request.type], request.name
    raise InvalidRequest(f"there is no kind of statistics with number {request.type}")
