"""Reads the runs' counters into the ledger regularly, saves it, and answers controllers' requests for traffic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice

from twisted.internet.defer import Deferred, TimeoutError, ensureDeferred
from twisted.internet.interfaces import IReactorTime

from node.base.errors import InvalidRequest, NodeError, UnknownName, Unsupported, shown
from node.base.logs import Logger
from node.base.periodic import Periodic
from node.base.slices import a_turn
from node.base.waiting import lasting
from node.contract.abilities import CountsSome
from node.contract.counters import DELIVERED, SEPARATOR, Both, Reading, Row, Scope
from node.contract.driver import Generation
from node.contract.generations import Generations
from node.contract.saved import Changes, Lasting, Saved
from node.state.store import Store
from node.traffic.beat import Beat, Begun
from node.traffic.ledger import Ledger, SetAside
from node.traffic.readings import Readings, Wanted
from node.traffic.reply import packed
from node.traffic.sums import Columns, Sums
from node.traffic.totals import OTHERS, Totals
from protos import service_pb2
from protos.columns_pb2 import Stats
from protos.service_pb2 import BaseInfoResponse, StatRequest

# Seconds between two checks whether a reading is due, or with a short interval this part of it.
TICK, PART = 0.5, 0.1
# The fraction of the interval for which a reading is fresh enough for metrics.
FRESH = 0.1
# Counters are booked and replies built in parts of this many (some 5 ms), with a turn of the reactor between.
SLICE = 10_000

# The counters that each type of request reads, and whether by name.
_ASKED = {
    service_pb2.Outbounds: (Scope.OUTBOUND, False),
    service_pb2.Outbound: (Scope.OUTBOUND, True),
    service_pb2.Inbounds: (Scope.INBOUND, False),
    service_pb2.Inbound: (Scope.INBOUND, True),
    service_pb2.UsersStat: (Scope.USER, False),
    service_pb2.UserStat: (Scope.USER, True),
}


class Watcher:
    """Follows the bytes as they are booked. It overrides those of these methods that concern it."""

    def booked(self, moved: Mapping[Scope, Sums]) -> None:
        """Called with bytes as they are booked, those of users by key.

        With USER_INBOUNDS those of `Scope.USER_INBOUND`, too: by key, `SEPARATOR` and the inbound's tag.
        """

    def saving(self, keys: Collection[str]) -> None:
        """Called when the rows of these users are being saved, so that what follows from them is saved with them."""


class Traffic(Lasting):
    """Traffic that was counted and not yet delivered. `interval`: seconds between two regular readings, at most."""

    title = "the counters"
    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        generations: Generations,
        is_user: Callable[[str], bool],
        store: Store,
        interval: float,
        totals: Totals | None = None,
    ) -> None:
        self._reactor = reactor
        self._generations = generations
        self._is_user = is_user
        self._store = store
        self.interval = interval
        self._beat = Beat(reactor, interval)
        self._ledger = Ledger(totals)
        self._watchers: tuple[Watcher, ...] = ()
        self._readings = Readings(reactor, self._read_one)
        self._poll = Periodic("reading and saving the counters", self._tick, min(TICK, interval * PART), reactor)
        self._paused = False
        # Why the last reading of a run failed.
        self._faults: dict[Generation, str] = {}
        self._read_at = self._saved_at = float("-inf")
        # The runs that another node may adopt, and their marks.
        self._adoptable: dict[Generation, str] = {}
        # The totals to report: those that are on disk.
        self._sums: Mapping[Scope, Sequence[Row]] = {}
        # When the last complete reading of all runs began.
        self._whole_at = reactor.seconds()

    @property
    def warnings(self) -> list[str]:
        """Warnings about failed readings."""
        return [self._faults[run] for run in self._generations.counting if run in self._faults] + self._poll.warnings

    @property
    def age(self) -> float:
        """Seconds since the last complete reading; 0 without a run. It grows while a core does not answer."""
        return self._reactor.seconds() - self._whole_at if self._generations.counting else 0.0

    @property
    def every(self) -> float:
        """Seconds between two regular readings now, unless the cores are idle."""
        return self._beat.seconds

    def summary(self, info: BaseInfoResponse) -> None:
        info.traffic_interval = self.every

    @property
    def pending(self) -> Mapping[Scope, int]:
        """The number of rows of each scope in the ledger."""
        return self._ledger.sizes

    def totals(self, scope: Scope) -> Iterator[Row]:
        """The totals, as of the last `settled`, without removed users. May be iterated in another thread."""
        rows = self._sums.get(scope, ())
        return (row for row in rows if scope is not Scope.USER or row.key == OTHERS or self._is_user(row.key))

    def by_inbound(self, key: str) -> Sequence[tuple[str, Both]]:
        """A user's bytes by inbound since the state file began, as of the last reading."""
        return self._ledger.by_inbound(key)

    def watched(self, watcher: Watcher) -> None:
        """Report the bytes to this watcher, too, from now on."""
        self._watchers += (watcher,)

    def known(self, run: Generation) -> Mapping[str, int]:
        """The booked counters of a run."""
        return self._ledger.known(run)

    def go_on(self, run: Generation, known: Mapping[str, int]) -> None:
        """Note the counters of a run that an earlier node process has booked."""
        self._ledger.go_on(run, known)

    def start(self) -> None:
        self._poll.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it there are no regular readings."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def restore(self, saved: Saved) -> None:
        """Add undelivered rows and totals of an earlier node."""
        self._ledger.restore(saved.rows)
        self._ledger.restore_totals(saved.totals)

    def leave(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the regular readings, and save everything."""
        self._poll.stop()
        self._note(self._ledger.changes())
        self._store.totals(self._ledger.totals.changes())

    def follow(self, runs: Mapping[Generation, str]) -> None:
        """Save the counters of these runs with their marks from now on, for a node that adopts them."""
        new = {run: mark for run, mark in runs.items() if run not in self._adoptable}
        self._adoptable = dict(runs)
        if new:
            # Together with the rows that include them.
            self.save_changed()
        for run, mark in new.items():
            self._store.booked(mark, self._ledger.all_counted(run))

    async def flushed(self) -> bool:
        """Wait until all that was saved is on disk. Returns whether it is; not if the disk has failed."""
        await self._store.flush()
        return not self._store.fault

    def forget_others(self) -> None:
        """Delete the saved counters of all other runs: no node can adopt them."""
        self._store.booked_only(frozenset(self._adoptable.values()))

    async def settled(self, patience: float) -> None:
        """Bring `totals` up to date with what is on disk: totals must not decrease when the node is killed.

        Waits for a hanging core, and for the disk, at most `patience` seconds each; then the last known sums stay.
        """
        for work in (self._refresh, self._keep):
            try:
                await ensureDeferred(work()).addTimeout(patience, self._reactor)
            except TimeoutError:
                self.log.debug("totals are reported as last known: the core or the disk is slow")

    async def _refresh(self) -> None:
        if self._reactor.seconds() - self._read_at >= FRESH * self.interval:
            await self.read()

    async def _keep(self) -> None:
        while sums := self._ledger.totals.changes(SLICE):
            self._store.totals(sums)
            if len(sums) == SLICE:
                await a_turn(self._reactor)
        # The store has all of these sums; bytes booked during the flush are not in it.
        saved = {scope: self._ledger.totals.all(scope) for scope in DELIVERED}
        await self._store.flush()
        self._sums = saved

    async def read(self, generation: Generation | None = None, wanted: Wanted = None) -> bool:
        """Read and book the counters of one run, or of all; `wanted`: these suffice.

        Returns whether there may be more: if there were any bytes, or a run failed (logged) or is slow. A reading is
        booked completely even if its caller gives up meanwhile.
        """
        began, counting = self._reactor.seconds(), self._generations.counting
        # A reading under way may be of a run that is gone meanwhile.
        self._ledger.keep({*counting, *self._readings.under_way, *filter(None, (generation,))})
        self._faults = {run: fault for run, fault in self._faults.items() if run in counting}
        if generation is not None:
            return await self._readings.one(generation)
        return await lasting(ensureDeferred(self._read_all(counting, began, wanted)))

    async def stats(self, request: StatRequest, delivered: Callable[[], Deferred[bool]]) -> Stats:
        """Answer a request: a StatResponse's rows, with all bytes counted until the request came.

        With a reset the rows come back if the reply is not delivered: only then `delivered` is called. Raises
        `UnknownName`, `Unsupported` and `InvalidRequest`.
        """
        scope, name = requested(request)
        # Most counters are users', so that reading all of theirs costs as much as reading all.
        await self.read(wanted=None if (scope, name) == (Scope.USER, None) else frozenset({(scope, name)}))
        self._require(scope)
        rows = self._ledger.listed(scope) if name is None else self._one(scope, name)
        if request.reset:
            delivered().addCallback(partial(self._settle, self._ledger.take(scope, name)))
        # In a list of all users zeros are left out.
        return await self._reply(rows, zeros=name is not None or scope is not Scope.USER)

    def save(self, changes: Changes) -> None:
        """Add all undelivered rows, all totals, and the booked counters of adoptable runs by their marks."""
        changes.rows = {(row.scope, row.key): row for row in self._ledger.everything()}
        changes.totals = {(row.scope, row.key): row for row in self._ledger.totals.everything()}
        changes.booked = {mark: self._ledger.all_counted(run) for run, mark in self._adoptable.items()}

    def save_changed(self) -> Deferred[None]:
        """Save the changed rows and totals, in parts. Fires when the store has all of them."""
        self._saved_at = self._reactor.seconds()
        return ensureDeferred(self._save_rest(self._save_part()))

    async def _save_rest(self, more: bool) -> None:
        while more:
            await a_turn(self._reactor)
            more = self._save_part()

    def _save_part(self) -> bool:
        """Save some of the changed rows and totals. Returns whether there may be more."""
        rows = self._ledger.changes(SLICE)
        self._note(rows)
        self._ledger.totals.make_room(Scope.USER, self._is_user)
        self._ledger.totals.make_room(Scope.USER_INBOUND, lambda name: self._is_user(name.partition(SEPARATOR)[0]))
        sums = self._ledger.totals.changes(SLICE)
        self._store.totals(sums)
        return SLICE in (len(rows), len(sums))

    def _note(self, rows: Sequence[Row]) -> None:
        keyed = {(row.scope, row.key): row for row in rows}
        self._store.rows(keyed)
        if rows:
            for run, mark in self._adoptable.items():
                self._store.booked(mark, self._ledger.counted(run, rows))
        keys = [key for scope, key in keyed if scope is Scope.USER]
        for watcher in self._watchers:
            watcher.saving(keys)

    def _settle(self, taken: SetAside, delivered: bool) -> None:
        self._ledger.settle(taken, delivered)
        if delivered:
            # At once: delivered bytes must not come back after a crash.
            self.save_changed()

    async def _tick(self) -> None:
        cores = self._cores
        if self._paused:
            return
        if not cores:
            self._whole_at = self._reactor.seconds()
        elif self._is_due(self._read_at, self.interval) or (
            self._is_due(self._read_at, self.every) and not self._beat.is_idle(cores)
        ):
            begun = self._beat.begin(cores)
            await self.read()
            await self.save_changed()
            ensureDeferred(self._note_cost(begun))
        if self._is_due(self._saved_at, self.every):
            self.save_changed()

    async def _note_cost(self, begun: Begun) -> None:
        """Note the cost of a reading when its bytes are on disk; not if the disk hangs."""
        with suppress(TimeoutError):
            await ensureDeferred(self._store.flush()).addTimeout(self.interval, self._reactor)
            self._beat.end(begun)

    def _is_due(self, last: float, seconds: float) -> bool:
        # Half of the shortest tick early is as good.
        return self._reactor.seconds() - last > seconds * (1 - PART / 2)

    @property
    def _cores(self) -> list[int | None]:
        return [run.pid for run in self._generations.counting]

    async def _read_all(self, counting: Sequence[Generation], began: float, wanted: Wanted) -> bool:
        moved = await self._readings.all(counting, wanted)
        if wanted is None:
            self._read_at = began
            self._beat.read([run.pid for run in counting], moved)
            silent = {*self._faults, *self._readings.under_way}
            self._whole_at = began if silent.isdisjoint(counting) else self._whole_at
        return moved

    async def _read_one(self, generation: Generation, wanted: Wanted) -> bool:
        try:
            if wanted is None or not isinstance(generation, CountsSome):
                reading = await generation.counters(self._ledger.seen(generation))
            else:
                reading = await generation.some_counters(wanted)
            moved = await self._book(generation, reading)
        except Exception as error:  # noqa: BLE001 - logged, and a warning in `info`; replies have what was read before
            self._ledger.unsee(generation)
            # A failure does not matter if the run is gone.
            if generation in self._generations.counting:
                self._faults[generation] = self._not_read(error, self._faults.get(generation, ""))
            return True
        self._faults.pop(generation, None)
        return moved

    def _not_read(self, fault: Exception, before: str) -> str:
        """The warning for a failed reading; it is logged if it differs from the previous one."""
        foreseen = isinstance(fault, NodeError)
        text = f"counters were not read: {fault if foreseen else f'internal error: {type(fault).__name__}'}"
        if text != before and foreseen:
            self.log.warn("{text}", text=text)
        elif text != before:
            self.log.failure("the core's counters were not read, by a fault of the node; the next reading tries again")
        return text

    async def _book(self, generation: Generation, reading: Reading) -> bool:
        moved, counters = False, iter(reading.items())
        for begin in range(0, len(reading), SLICE):
            if begin:
                await a_turn(self._reactor)
            booked = self._ledger.book_part(generation, islice(counters, SLICE))
            moved |= any(sums.moved for sums in booked.values())
            for watcher in self._watchers:
                watcher.booked(booked)
        return moved

    async def _reply(self, rows: Columns, zeros: bool) -> Stats:
        reply, (names, ups, downs) = Stats(), rows
        for begin in range(0, len(names), SLICE):
            if begin:
                await a_turn(self._reactor)
            part = slice(begin, begin + SLICE)
            reply.stat.extend(packed(names[part], ups[part], downs[part], zeros))
        return reply

    def _one(self, scope: Scope, name: str) -> Columns:
        row = self._ledger.one(scope, name)
        if row is None and scope is Scope.USER and self._is_user(name):
            row = Row(scope, name, 0, 0)
        if row is None:
            raise UnknownName(f"there is no {scope.value} {shown(name)}")
        return [row.name], [row.uplink], [row.downlink]

    def _require(self, scope: Scope) -> None:
        # Only the newest run counts: a draining one of another configuration ends soon.
        if any(scope in generation.uncounted for generation in self._generations.counting[:1]):
            raise Unsupported(
                f"this core cannot count {scope.value}s with this configuration: see the warnings of info"
            )


def requested(request: StatRequest) -> tuple[Scope, str | None]:
    """The requested scope and name; None for all names. Raises `InvalidRequest`."""
    if request.type not in _ASKED:
        raise InvalidRequest(f"unknown statistics type {request.type}")
    scope, by_name = _ASKED[request.type]
    return scope, request.name if by_name else None
