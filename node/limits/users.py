"""The limits of users, as the rest of the node uses them: set, listed, summed up, enforced."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from node.backend.generations import Generations
from node.backend.runner import Runner
from node.backend.supplied import check
from node.base.errors import InvalidRequest, shown
from node.base.reactor import PooledReactor
from node.contract.accounts import Unusable, key_of
from node.contract.connections import Address, SeesConnections
from node.events.journal import Tells
from node.limits.address_events import AddressEvents
from node.limits.address_limits import AddressLimits, notes
from node.limits.addresses import Grouping
from node.limits.book import Book
from node.limits.enforcement import Enforcement
from node.limits.events import LimitEvents
from node.limits.limits import Defaults
from node.limits.listing import Listing
from node.limits.pacer import Pacer
from node.state.store import Store
from node.traffic.polling import Traffic
from protos.service_pb2 import (
    GetLimitsRequest,
    GetLimitsResponse,
    LimitsSummary,
    SetLimitsRequest,
    SetLimitsResponse,
    User,
)

NO_USER = "not a user now: the limits apply once they are one"


class UserLimits:
    """Owns and connects the parts that enforce users' limits."""

    def __init__(
        self,
        reactor: PooledReactor,
        runner: Runner,
        generations: Generations,
        traffic: Traffic,
        store: Store,
        journal: Tells,
        defaults: Defaults,
        interval: float,
        grouping: Grouping,
        grace: float,
    ) -> None:
        self._reactor = reactor
        self._desired = runner.desired
        self._generations = generations
        self._runs: Sequence[SeesConnections] = ()
        self._blind = False
        self.book = Book(time.time, defaults, lambda key: self._desired.roster.tags_of(key), self._name_of)
        self._addresses = AddressLimits(
            reactor,
            runs=lambda: self._runs,
            limit_of=self.book.limit_of,
            events=AddressEvents(journal, reactor, self._name_of),
            grouping=grouping,
            grace=grace,
        )
        self._enforcement = Enforcement(
            *(reactor, self.book, runner.users, store, LimitEvents(journal, reactor, self._name_of)),
            read=lambda wanted: traffic.read(wanted=wanted),
            save=traffic.save,
            may_carry=self._may_carry,
            interval=interval,
        )
        self._pacer = Pacer(reactor, generations, self.book.limit_of)
        self._listing = Listing(reactor, self.book, self)
        self._listening = False
        self.book.changed = self._changed
        self._desired.limiter = self.book
        traffic.watched(self._enforcement)
        generations.watch(self._follow)

    @property
    def warnings(self) -> list[str]:
        """Warnings for `info`."""
        return [*self._enforcement.warnings, *self._addresses.warnings, *self._pacer.warnings]

    def start(self) -> None:
        self._enforcement.start()
        self._addresses.start()
        self._pacer.start()

    def stop(self) -> None:
        self._addresses.stop()
        self._enforcement.stop()
        self._pacer.stop()

    def restore(self, records: Iterable[tuple[str, bytes]]) -> None:
        """Load the records of an earlier node."""
        self.book.restore(records)
        self._enforcement.handle_soon()

    async def set(self, request: SetLimitsRequest) -> SetLimitsResponse:
        """SetLimits. Returns when all is in force; raises `InvalidRequest` and changes nothing."""
        overrides = {}
        for user in request.users:
            try:
                check(User(email=user.name, limits=user.limits if user.HasField("limits") else None))
            except Unusable as error:
                raise InvalidRequest(f"user {shown(user.name)}: {error}") from error
            packed = user.limits.SerializeToString(deterministic=True) if user.HasField("limits") else None
            overrides[key_of(user.name)] = user.name, packed
        refused = await self._enforcement.override({key: packed for key, (_, packed) in overrides.items()})
        reply = SetLimitsResponse()
        for key, (name, _) in overrides.items():
            for text in self.notes(key) if self.book.is_user(key) else [NO_USER]:
                reply.notes.add(name=name, text=text)
        for email, reason in refused:
            if key_of(email) in overrides:
                reply.notes.add(name=overrides[key_of(email)][0], text=f"the user is not in the core: {reason}")
        return reply

    async def page(self, request: GetLimitsRequest) -> GetLimitsResponse:
        """GetLimits: a page of the users with limits."""
        return await self._listing.page(request.after, request.limit, request.names, request.off)

    def summary(self) -> LimitsSummary:
        """The numbers for `info`: users with limits, barred users, and the like."""
        summary = LimitsSummary()
        summary.CopyFrom(self.book.summary())
        summary.too_many_addresses = self._addresses.ended
        return summary

    # Satisfies `node.limits.listing.Sight`

    async def addresses(self, keys: Collection[str]) -> Mapping[str, Sequence[str]]:
        return await self._addresses.addresses(keys)

    def notes(self, key: str) -> Sequence[str]:
        unseen = {tag: why for run in self._runs for tag, why in run.unseen.items()}
        tags = self._desired.roster.tags_of(key)
        addresses = notes(self.book.limit_of(key), tags, unseen, blind=self._blind)
        return [*addresses, *self._pacer.notes(key)]

    # The cores

    def _follow(self) -> None:
        """Called when a core came or went."""
        serving = self._generations.serving
        self._runs = [run for run in serving if isinstance(run, SeesConnections)]
        self._blind = len(self._runs) < len(serving)
        self._listen()

    def _listen(self) -> None:
        """Have the cores report new connections once any user has limits; before that the cost is saved."""
        if self.book.limits_anybody:
            for run in self._runs:
                run.arrived = self._arrived
            self._listening = True

    def _changed(self, keys: Collection[str]) -> None:
        """Called when the limits of these users may have changed, or they came or went."""
        if not self._listening:
            self._listen()
        self._addresses.changed(keys)
        self._pacer.changed(keys)

    def _arrived(self, key: str, address: Address) -> None:
        self._enforcement.arrived(key)
        self._addresses.arrived(key, address)
        self._pacer.arrived(key, address)

    def _may_carry(self, key: str) -> bool:
        return self._blind or any(run.may_carry(key) for run in self._runs)

    def _name_of(self, key: str) -> str:
        packed = self._desired.roster.users.get(key)
        return key if packed is None else User.FromString(packed).email
