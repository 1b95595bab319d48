"""The users of one run of Xray: apply changes, record what the core confirmed, audit it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

from drivers.process import starting
from drivers.process.aliases import unaliased
from drivers.process.channel import MAX_REQUEST, ApiFailed
from drivers.process.generation import CoreGeneration
from drivers.sockets.sock_diag import Endpoint, Ports
from drivers.xray import wireguard
from drivers.xray.accounts import as_given, email_of
from drivers.xray.api import Api, Operation
from drivers.xray.config import Plan
from drivers.xray.connections import Connections
from drivers.xray.ingress import is_over_udp, ports_of
from drivers.xray.messages import receiver_of
from drivers.xray.ownership import Pair
from drivers.xray.user_changes import LIVE_SECONDS, Batch, Swap, choose, stuck, swap_of
from node.base.logs import Logger
from node.contract.abilities import NotShared
from node.contract.accounts import Accounts, Change, Refusal, apply, key_of
from node.contract.driver import Applied, Host

# The most bytes of framing around an account in its inbound.
FRAME = 5


class Method(NamedTuple):
    """How changes are applied: inbounds to swap, and inbounds whose changes wait for a new run."""

    swapped: frozenset[str]
    stuck: frozenset[str] = frozenset()


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
        run: CoreGeneration[Any],
    ) -> None:
        self._host = host
        self._plan = plan
        self._api = api
        self._connections = connections
        self._run = run
        self.accounts = accounts
        managed = [handler for handler in plan.base.inbound if handler.tag in plan.inbounds]
        self._swaps = {handler.tag: swap_of(handler) for handler in managed}
        self._by_udp = {handler.tag for handler in managed if is_over_udp(handler)}
        self._sizes = {handler.tag: handler.ByteSize() for handler in managed}
        self._ports = {handler.tag: ports_of(receiver_of(handler)) for handler in managed}
        # Users being added: the core may have them before its reply arrives.
        self._entering: set[Pair] = set()
        # Inbounds with failed calls, which the core may have applied or may apply late.
        self._doubtful: set[str] = set()
        # WireGuard inbounds with a failed call: another user may still have a new user's key or address.
        self._uncertain: set[str] = set()
        # Inbounds that were removed and could not be added again: only a new run has them.
        self._lost: set[str] = set()
        # By tag: removed users whom the core still has. It drains, and gets them no connection unless it leads again.
        self.kept_out: dict[str, Accounts] = {}

    def is_in(self, pair: Pair) -> bool:
        """Whether the core has this user, or may have soon, in this inbound; in any if the tag is empty."""
        tag, key = pair
        tags = (tag,) if tag else tuple(self.accounts)
        return any(key in self.accounts[tag] or (tag, key) in self._entering for tag in tags)

    async def apply(self, changes: Sequence[Change]) -> Applied:
        """Apply all removals, then all additions; swap inbounds where single calls cost too much or are unsafe.

        If only a new run can bring the additions in, they are left for it, and the removals are applied all the same.
        Connections of removed and replaced accounts are cut.
        """
        # A lost inbound has no users.
        lost = frozenset(self._lost)
        some = [change for change in changes if change.tag not in lost]
        if self._run.drains:
            some = await self._keep_out(some)
        method = self._method(some)
        without = lost if method else frozenset(self.accounts)
        if method is None:
            some = [change._replace(packed=None) for change in some if self._is_removed(change)]
            method = self._method(some, at_any_cost=True)
            assert method is not None
        refused = await self._apply_live([change for change in some if change.tag not in method.swapped | method.stuck])
        left: list[Change] = []
        for tag, each in grouped(change for change in some if change.tag in method.swapped).items():
            more, not_back = await self._swap(tag, each)
            refused += more
            left += not_back
        return Applied(refused, left + [change for change in changes if self._is_left(change, without, method.stuck)])

    def _is_left(self, change: Change, without: Set[str], stuck: Set[str]) -> bool:
        """Whether a change waits for a new run: `without` are inbounds without additions, `stuck` without removals."""
        return change.tag in without if change.packed is not None else change.tag in stuck and self._has(change)

    async def _keep_out(self, changes: Sequence[Change]) -> list[Change]:
        """Cut the removed users of a run that drains, where calls are slow or unsafe. Returns the other changes.

        They stay in the core's list: a connection that they had begun before is cut when its access line comes.
        """
        by_tag = grouped(changes)
        batches = {tag: self._batch(tag, some) for tag, some in by_tag.items()}
        slow = {tag for tag, batch in batches.items() if batch.live > LIVE_SECONDS and batch.swap is not Swap.DEAF}
        dear = slow | {tag for tag, batch in batches.items() if batch.needs_swap}
        gone = [change for tag in dear for change in by_tag[tag] if self._has(change)]
        if gone:
            # First: an access line that comes while others are cut must cut its connection, too.
            for change in gone:
                self.kept_out.setdefault(change.tag, {})[change.key] = self.accounts[change.tag].pop(change.key)
            await self._cut(map(pair_of, gone))
            await self._connections.end_crowded(dear)
        return [change for change in changes if change.tag not in dear]

    async def put_out(self) -> None:
        """Remove those who are only kept out, before the run gets new connections again. Raises `NotShared`."""
        for tag in list(self.kept_out):
            if self._swap_of(tag) is Swap.DEAF:
                raise NotShared(f"inbound {tag} still has removed users, and cannot be swapped now")
            try:
                await self._put(tag, self.accounts[tag])
            except ApiFailed as error:
                raise NotShared(f"inbound {tag} still has removed users: {error}") from error

    def readmit(self) -> None:
        """Count those who are only kept out as users again: the run gets new connections, so they are to be removed."""
        for tag, users in self.kept_out.items():
            self.accounts[tag] |= users
        self.kept_out.clear()

    async def audit(self) -> int:
        """Compare `accounts` with the core and correct them. Returns how many users differed. Raises `ApiFailed`."""
        return sum([await self._audit(tag, accounts) for tag, accounts in self.accounts.items()])

    async def take_stock(self) -> None:
        """Fill `accounts` from the core. Raises `ApiFailed`."""
        for tag, accounts in self.accounts.items():
            if self._is_tunnel(tag):
                # The core's list lacks e-mails: the next audit compares it with the users that are known.
                self._doubtful.add(tag)
                continue
            accounts.clear()
            for user in await self._api.list_users(tag):
                accounts[key_of(user.email)] = as_given(user).SerializeToString()

    async def _audit(self, tag: str, accounts: Accounts) -> int:
        """Compare the number of users; list them only if it differs, or may be equal by chance."""
        before, kept_out = dict(accounts), self.kept_out.get(tag, {})
        if await self._api.count_users(tag) == len(accounts) + len(kept_out) and tag not in self._doubtful:
            return 0
        users = [user for user in await self._api.list_users(tag) if key_of(user.email) not in kept_out]
        if self.accounts[tag] is not accounts or accounts != before:
            return 0  # users changed meanwhile, or were swapped: the next audit decides
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
            self._uncertain.add(tag)
        return len(missing) + len(strangers) + len(others)

    # How to apply changes

    def _method(self, changes: Iterable[Change], at_any_cost: bool = False) -> Method | None:
        """How to apply these changes; None if they need a new run.

        `at_any_cost`, for removals: never None; stuck are inbounds where a new run is much faster.
        """
        by_tag = grouped(changes)
        batches = {tag: self._batch(tag, some) for tag, some in by_tag.items()}
        users, left = self._users_of_new_run(by_tag), frozenset[str]()

        def fits(tag: str) -> bool:
            return self._fits(tag, by_tag[tag])

        if at_any_cost:
            left, users = stuck(batches, users, fits), math.inf
        swapped = choose({tag: batch for tag, batch in batches.items() if tag not in left}, users, fits)
        return None if swapped is None else Method(swapped, left)

    def _users_of_new_run(self, by_tag: Mapping[str, Sequence[Change]]) -> float:
        """How many accounts a new run would have; infinite for a draining run, which no new run replaces."""
        if self._run.drains:
            return math.inf
        return sum(map(len, self.accounts.values())) + sum(map(len, by_tag.values()))

    def _batch(self, tag: str, changes: Sequence[Change]) -> Batch:
        accounts = self.accounts[tag]
        removed = sum([key in accounts for _, key, _ in changes])
        added = sum([packed is not None for _, _, packed in changes])
        return Batch(self._plan.inbounds[tag].protocol, self._swap_of(tag), len(accounts), removed, added)

    def _swap_of(self, tag: str) -> Swap:
        """The effect of a swap now. Where clients have sessions over UDP, these would go to two runs that share it."""
        apart = self._run.shared and tag in self._by_udp
        return self._swaps[tag] if self._run.renewable and not apart else Swap.DEAF

    def _fits(self, tag: str, changes: Sequence[Change]) -> bool:
        """Whether the changed inbound fits in one call."""
        accounts = self.accounts[tag]
        more = sum([len(packed or b"") - len(accounts.get(key, b"")) for _, key, packed in changes])
        frames = (FRAME + len(self._api.aliases.end(tag))) * (len(accounts) + len(changes))
        return self._sizes[tag] + sum(map(len, accounts.values())) + more + frames <= MAX_REQUEST

    # One call per user

    async def _apply_live(self, changes: Sequence[Change]) -> list[Refusal]:
        leaving = list(filter(self._is_removed, changes))
        refused = await self._alter([*map(self._removal, leaving), *additions(self._yielding(changes))])
        # A failed removal leaves the user with the old account.
        gone = [change for change in leaving if not self._has(change)]
        wanted = await self._old_connections(gone, changes)
        adds = [change for change in changes if not self._has(change) or self._is_replaced(change)]
        taken = self._still_held(adds)
        adds = [change for change in adds if change not in taken]
        with self._letting_in(adds):
            refused += [*taken.values(), *await self._alter(additions(adds))]
        # Last: searching the core's sockets takes milliseconds, for which additions need not wait.
        await self._connections.end(wanted)
        self._connections.note_removed(map(pair_of, gone))
        return refused

    async def _old_connections(self, gone: Sequence[Change], changes: Sequence[Change]) -> dict[Endpoint, Ports]:
        """List the connections of users who are `gone`: the core admits them by no credential at the moment.

        Those of users who were, and come with these changes, are distinguished from their new ones, too.
        """
        now, coming = set(gone), [change for change in changes if change.packed is not None]
        left = [change for change in coming if change in now or self._comes_back(change)]
        await self._connections.credentials_change(map(pair_of, left))
        # Last: the core may have reported more of them meanwhile.
        return self._connections.of(map(pair_of, gone))

    def _comes_back(self, change: Change) -> bool:
        """Whether a user who left lately is not in."""
        return not self._has(change) and self._connections.left_lately(pair_of(change))

    def _is_removed(self, change: Change) -> bool:
        return self._has(change) and not self._is_replaced(change)

    def _has(self, change: Change) -> bool:
        return change.key in self.accounts[change.tag]

    # WireGuard

    def _is_tunnel(self, tag: str) -> bool:
        """Whether the inbound is WireGuard: its core moves an address to a new user without an error."""
        return self._plan.inbounds[tag].protocol == "wireguard"

    def _is_replaced(self, change: Change) -> bool:
        """Whether a user's account is replaced in place, without a removal."""
        before = self.accounts[change.tag].get(change.key)
        if before is None or change.packed is None or not self._is_tunnel(change.tag):
            return False
        return wireguard.keeps_key(before, change.packed)

    def _yielding(self, changes: Iterable[Change]) -> Iterator[Change]:
        """Changes to apply first: users who stay give up addresses that others get."""
        for tag, some in grouped(change for change in changes if self._is_tunnel(change.tag)).items():
            yield from wireguard.yielding(self.accounts[tag], some)

    def _still_held(self, adds: Iterable[Change]) -> dict[Change, Refusal]:
        """Refusals of additions whose key or address another user still has, whose removal failed."""
        taken: dict[Change, Refusal] = {}
        for tag, some in grouped(change for change in adds if change.tag in self._uncertain).items():
            for change, holder in wireguard.held_back(self.accounts[tag], some):
                taken[change] = refusals([change], f"{holder!r} still has this user's key or one of their addresses")[0]
        return taken

    # Calls

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
        """Run operations and record those that the core confirmed."""
        if not operations:
            return []
        try:
            results = await self._api.alter(operations)
        except BaseException:
            for operation in operations:
                self._doubt(operation.tag)
            raise
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

    def _doubt(self, tag: str) -> None:
        """Note that the core may have applied a call, or may apply it late."""
        self._doubtful.add(tag)
        if self._is_tunnel(tag):
            self._uncertain.add(tag)

    # Swaps

    async def _swap(self, tag: str, changes: list[Change]) -> Applied:
        """Remove the inbound and add it again with the changed users; live connections continue."""
        before = self.accounts[tag]
        gone = [change for change in changes if self._has(change)]
        try:
            with self._letting_in(changes):
                wanted = await self._put(tag, apply(changes, {tag: before})[tag], changes)
        except (ApiFailed, NotShared) as error:
            return await self._put_back(tag, changes, error)
        wanted |= self._connections.of(pair_of(change) for change in gone if change.packed is None)
        await self._connections.end(wanted)
        self._connections.note_removed(pair_of(change) for change in gone if change.packed is None)
        return Applied([], [])

    async def _put(self, tag: str, accounts: Accounts, changes: Sequence[Change] = ()) -> dict[Endpoint, Ports]:
        """Swap an inbound. Returns the connections that users with these changes had until then.

        Raises `ApiFailed` and `NotShared`; then it is unknown whether users reach the inbound, and which it has.
        """
        gone = [change for change in changes if self._has(change)]
        making = self._plan.handler, tag, accounts, self._api.aliases
        handler = await starting.built(self._host.reactor, {tag: accounts}, *making)
        async with self._run.renewing(self._ports[tag]):
            await self._api.remove_inbound(tag)
            try:
                wanted = await self._old_connections(gone, changes)
            finally:
                await self._api.add_inbound(handler)
        self.accounts[tag] = accounts
        self.kept_out.pop(tag, None)
        return wanted

    async def _put_back(self, tag: str, changes: Sequence[Change], why: Exception) -> Applied:
        """After a failed swap, restore the inbound with the users who stay; if that fails, leave all to a new run."""
        staying = apply([change._replace(packed=None) for change in changes], {tag: self.accounts[tag]})[tag]
        gone = [pair_of(change) for change in changes if self._has(change)]
        try:
            await self._put(tag, staying)
        except (ApiFailed, NotShared) as error:
            text = "inbound {tag} could not be restored: starting another core with its users: {fault}"
            self.log.error(text, tag=tag, fault=error)
            await self._cut(gone)
            self.accounts[tag] = {}
            self._lost.add(tag)
            coming = [change for change in changes if change.packed is not None]
            return Applied([], [*(Change(tag, key, packed) for key, packed in staying.items()), *coming])
        # Not before: until the swap removed the inbound they could still connect.
        await self._cut(gone)
        return Applied(refusals(changes, unaliased(str(why))), [])

    async def _cut(self, gone: Iterable[Pair]) -> None:
        gone = [*gone]
        await self._connections.end(self._connections.of(gone))
        self._connections.note_removed(gone)


def refusals(changes: Iterable[Change], reason: str) -> list[Refusal]:
    """Refusals of all additions among these changes."""
    return [
        Refusal(email_of(change.packed), f"{change.tag}: {reason}") for change in changes if change.packed is not None
    ]


def additions(changes: Iterable[Change]) -> list[Operation]:
    return [Operation(tag, email_of(packed), packed) for tag, _, packed in changes if packed is not None]


def grouped(changes: Iterable[Change]) -> dict[str, list[Change]]:
    by_tag: dict[str, list[Change]] = {}
    for change in changes:
        by_tag.setdefault(change[0], []).append(change)
    return by_tag


def pair_of(change: Change) -> Pair:
    return change.tag, change.key
