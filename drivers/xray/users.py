"""The users of one run of Xray: those that it confirmed, and how changed ones get in and out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from drivers.channel import ApiFailed
from drivers.process import readiness as starting
from drivers.xray import wireguard
from drivers.xray.accounts import as_given, email_of
from drivers.xray.api import MAX_REQUEST, Api, Operation
from drivers.xray.config import Plan
from drivers.xray.connections import Connections
from drivers.xray.suspects import Pair
from drivers.xray.ways import Swap, Work, choose, swap_of
from node.contract.accounts import Accounts, Change, Refusal, apply, key_of
from node.contract.driver import Applied, Host
from node.logs import Logger

# Bytes around an account in its inbound, at most.
FRAME = 5


class Listeners(Protocol):
    """What the run has of listeners: whether others share them, and whether no new connections come to it."""

    @property
    def shared(self) -> bool: ...

    @property
    def drains(self) -> bool: ...


class Users:
    """The accounts of the managed inbounds, by tag, as the core confirmed them."""

    log = Logger()

    def __init__(
        self,
        host: Host,
        plan: Plan,
        api: Api,
        connections: Connections,
        accounts: dict[str, Accounts],
        listeners: Listeners,
    ) -> None:
        self._host = host
        self._plan = plan
        self._api = api
        self._connections = connections
        self._listeners = listeners
        self.accounts = accounts
        managed = [handler for handler in plan.base.inbound if handler.tag in plan.inbounds]
        self._swaps = {handler.tag: swap_of(handler) for handler in managed}
        self._sizes = {handler.tag: handler.ByteSize() for handler in managed}
        # Users who are being let in: the core may have them before we hear of it.
        self._entering: set[Pair] = set()
        # Inbounds with calls that failed: they may have been done, or be done late.
        self._doubtful: set[str] = set()
        # Tunnels in which something failed once: others may still have what a user gets.
        self._wary: set[str] = set()
        # Inbounds that were taken out and not put back: only a new run has them again.
        self._lost: set[str] = set()

    def is_in(self, pair: Pair) -> bool:
        """Whether the core lets this user in by this inbound, or by any where the tag is not known."""
        tag, key = pair
        tags = (tag,) if tag else tuple(self.accounts)
        return any(key in self.accounts[tag] or (tag, key) in self._entering for tag in tags)

    async def apply(self, changes: Sequence[Change]) -> Applied:
        """All removals, then all additions; inbounds where that is dear or unsafe are swapped whole.

        Connections that came by an account which is removed or replaced are ended.
        """
        swapped = self._swapped(changes)
        if swapped is None or any(change.tag in self._lost for change in changes):
            return Applied([], list(changes))
        refused = await self._apply_live([change for change in changes if change.tag not in swapped])
        left: list[Change] = []
        for tag, some in grouped(change for change in changes if change.tag in swapped).items():
            more, stuck = await self._swap(tag, some)
            refused += more
            left += stuck
        return Applied(refused, left)

    async def audit(self) -> int:
        """Have `accounts` tell the truth; in how many users they did not. Raises `ApiFailed`."""
        return sum([await self._audit(tag, accounts) for tag, accounts in self.accounts.items()])

    async def take_stock(self) -> None:
        """Have `accounts` be what the core has, of which nothing is known. Raises `ApiFailed`."""
        for tag, accounts in self.accounts.items():
            for user in await self._api.list_users(tag):
                accounts[key_of(user.email)] = as_given(user).SerializeToString()

    async def _audit(self, tag: str, accounts: Accounts) -> int:
        """Count first, and list only where the count differs, or may be the same by chance."""
        before = dict(accounts)
        if await self._api.count_users(tag) == len(accounts) and tag not in self._doubtful:
            return 0
        users = await self._api.list_users(tag)
        if self.accounts[tag] is not accounts or accounts != before:
            return 0  # users changed meanwhile, or all of them with a swap: the next look tells
        self._doubtful.discard(tag)
        tunnel = self._is_tunnel(tag)
        real = wireguard.listed(accounts, users) if tunnel else {key_of(user.email): user for user in users}
        others = wireguard.differing(accounts, real) if tunnel else {}
        accounts |= others
        missing = accounts.keys() - real.keys()
        for key in missing:
            del accounts[key]
        strangers = real.keys() - accounts.keys()
        for key in strangers:
            accounts[key] = real[key].SerializeToString()
        if strangers and tunnel:
            self._wary.add(tag)
        return len(missing) + len(strangers) + len(others)

    # Which way

    def _swapped(self, changes: Iterable[Change]) -> frozenset[str] | None:
        """The inbounds to be swapped for these changes; None if they take a new run."""
        by_tag = grouped(changes)
        works = {tag: self._work(tag, some) for tag, some in by_tag.items()}
        everybody = sum(map(len, self.accounts.values())) + sum(map(len, by_tag.values()))
        return choose(works, everybody, lambda tag: self._fits(tag, by_tag[tag]))

    def _work(self, tag: str, changes: Sequence[Change]) -> Work:
        accounts = self.accounts[tag]
        removed = sum([key in accounts for _, key, _ in changes])
        added = sum([packed is not None for _, _, packed in changes])
        swap = Swap.DEAF if self._listeners.shared else self._swaps[tag]
        return Work(
            self._plan.inbounds[tag].protocol, swap, len(accounts), removed, added, quiet=self._listeners.drains
        )

    def _fits(self, tag: str, changes: Sequence[Change]) -> bool:
        """Whether the inbound as it should be can be handed over in one call."""
        accounts = self.accounts[tag]
        more = sum([len(packed or b"") - len(accounts.get(key, b"")) for _, key, packed in changes])
        frames = FRAME * (len(accounts) + len(changes))
        return self._sizes[tag] + sum(map(len, accounts.values())) + more + frames <= MAX_REQUEST

    # One by one

    async def _apply_live(self, changes: Sequence[Change]) -> list[Refusal]:
        leaving = [change for change in changes if self._has(change) and not self._stays(change)]
        if shaking := {change.tag for change in leaving if self._work(change.tag, [change]).endangered}:
            await self._connections.end_handshakes(shaking)
        refused = await self._alter([*map(self._removal, leaving), *additions(self._yielding(changes))])
        # A user who could not be removed is still there with the old account.
        gone = [change for change in leaving if not self._has(change)]
        wanted = self._connections.of(map(pair_of, gone))
        await self._connections.suspect(pair_of(change) for change in gone if change.packed is not None)
        adds = [change for change in changes if not self._has(change) or self._stays(change)]
        taken = self._taken(adds)
        adds = [change for change in adds if change not in taken]
        with self._letting_in(adds):
            refused += [*taken.values(), *await self._alter(additions(adds))]
        # Looking through the core's sockets takes some milliseconds, for which nobody who is added has to wait.
        await self._connections.end(wanted)
        self._connections.put_out(map(pair_of, gone))
        return refused

    def _has(self, change: Change) -> bool:
        return change.key in self.accounts[change.tag]

    # Tunnels

    def _is_tunnel(self, tag: str) -> bool:
        """Whether users have addresses there, which the core takes from whoever has them."""
        return self._plan.inbounds[tag].protocol == "wireguard"

    def _stays(self, change: Change) -> bool:
        """Whether a user gets another account in the place of theirs, and is not removed for that."""
        before = self.accounts[change.tag].get(change.key)
        if before is None or change.packed is None or not self._is_tunnel(change.tag):
            return False
        return wireguard.keeps_key(before, change.packed)

    def _yielding(self, changes: Iterable[Change]) -> Iterator[Change]:
        """Who stays and gives up first what others get."""
        for tag, some in grouped(change for change in changes if self._is_tunnel(change.tag)).items():
            yield from wireguard.yielding(self.accounts[tag], some)

    def _taken(self, adds: Iterable[Change]) -> dict[Change, Refusal]:
        """The additions of what somebody else still has, who could not be removed."""
        taken: dict[Change, Refusal] = {}
        for tag, some in grouped(change for change in adds if change.tag in self._wary).items():
            for change, holder in wireguard.held_back(self.accounts[tag], some):
                taken[change] = refusals([change], f"{holder!r} still has what this user is to get")[0]
        return taken

    # What is asked of the core

    def _doubt(self, tag: str) -> None:
        self._doubtful.add(tag)
        if self._is_tunnel(tag):
            self._wary.add(tag)

    def _removal(self, change: Change) -> Operation:
        return Operation(change.tag, email_of(self.accounts[change.tag][change.key]), None)

    @contextmanager
    def _letting_in(self, changes: Iterable[Change]) -> Iterator[None]:
        self._entering = {(tag, key) for tag, key, packed in changes if packed is not None}
        try:
            yield
        finally:
            self._entering = set()

    async def _alter(self, operations: list[Operation]) -> list[Refusal]:
        """Run these and record what the core confirmed."""
        if not operations:
            return []
        results = await self._api.alter(operations)
        refused = []
        for operation, fault in zip(operations, results, strict=True):
            accounts = self.accounts[operation.tag]
            if fault is not None:
                self._doubt(operation.tag)
                refused.append(Refusal(operation.email, f"{operation.tag}: {fault}"))
            elif operation.packed is None:
                accounts.pop(key_of(operation.email), None)
            else:
                accounts[key_of(operation.email)] = operation.packed
        return refused

    # The whole inbound

    async def _swap(self, tag: str, changes: list[Change]) -> Applied:
        """Take the inbound out and put it back with the users as they should be; live connections go on."""
        before = self.accounts[tag]
        gone = [change for change in changes if self._has(change)]
        # Before, since afterwards connections by a new credential could be among them.
        wanted = self._connections.of(map(pair_of, gone))
        await self._connections.suspect(pair_of(change) for change in gone if change.packed is not None)
        try:
            with self._letting_in(changes):
                await self._put(tag, apply(changes, {tag: before})[tag])
        except ApiFailed as error:
            return await self._put_back(tag, changes, error)
        wanted |= self._connections.of(pair_of(change) for change in gone if change.packed is None)
        await self._connections.end(wanted)
        self._connections.put_out(pair_of(change) for change in gone if change.packed is None)
        return Applied([], [])

    async def _put(self, tag: str, accounts: Accounts) -> None:
        """Swap an inbound. Raises `ApiFailed`: nobody knows then whether there is one, and with which users."""
        handler = await starting.built(self._host.reactor, {tag: accounts}, self._plan.handler, tag, accounts)
        await self._api.replace_inbound(handler)
        self.accounts[tag] = accounts

    async def _put_back(self, tag: str, changes: Sequence[Change], why: ApiFailed) -> Applied:
        """A swap failed: who stays gets in again. If that fails, too, nobody does, and they are left for a new run."""
        staying = apply([change._replace(packed=None) for change in changes], {tag: self.accounts[tag]})[tag]
        gone = [pair_of(change) for change in changes if self._has(change)]
        try:
            await self._put(tag, staying)
        except ApiFailed as error:
            self.log.error("inbound {tag} takes a new run: it was not put back: {fault}", tag=tag, fault=error)
            self.accounts[tag] = {}
            self._lost.add(tag)
            coming = [change for change in changes if change.packed is not None]
            return Applied([], [*(Change(tag, key, packed) for key, packed in staying.items()), *coming])
        # Not before: while the inbound was not taken out they could come in.
        await self._connections.end(self._connections.of(gone))
        self._connections.put_out(gone)
        return Applied(refusals(changes, str(why)), [])


def refusals(changes: Iterable[Change], reason: str) -> list[Refusal]:
    """Of these nobody came in."""
    return [
        Refusal(email_of(change.packed), f"{change.tag}: {reason}") for change in changes if change.packed is not None
    ]


def additions(changes: Iterable[Change]) -> list[Operation]:
    """What lets these users in."""
    return [Operation(tag, email_of(packed), packed) for tag, _, packed in changes if packed is not None]


def grouped(changes: Iterable[Change]) -> dict[str, list[Change]]:
    """Changes by their inbounds."""
    by_tag: dict[str, list[Change]] = {}
    for change in changes:
        by_tag.setdefault(change[0], []).append(change)
    return by_tag


def pair_of(change: Change) -> Pair:
    return change.tag, change.key
