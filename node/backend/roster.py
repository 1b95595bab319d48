"""The roster of wanted users: who may use which inbound, and which user holds a credential. Pure.

Users are kept as serialised messages: 100,000 message objects would cost hundreds of megabytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from ipaddress import ip_address
from itertools import count
from typing import TypeVar

from node.backend.supplied import Supplied, Tags, check, normal, one_spelling
from node.contract.accounts import Account, AccountOf, Accounts, Refusal, Unusable, key_of
from node.contract.driver import Plan
from protos.service_pb2 import User

K = TypeVar("K")
L = TypeVar("L")
V = TypeVar("V")

# Revisions never repeat, not even after a restart of the node.
_REVISIONS = count(secrets.randbits(62))


class Roster:
    """The wanted users, and the accounts that follow from them.

    Credentials, and addresses in a tunnel, are unique inside an inbound: the first user in stored order who claims one
    holds it, and a user who does not hold all of their claims is not in the target. A user whose accounts change moves
    to the end of that order; this rule holds for single changes, whole sets and after a restart. A user who is `off`
    stays in the roster and keeps their claims, but is not in the target.
    """

    def __init__(self, tags: Iterable[str], account_of: AccountOf) -> None:
        self.users: dict[str, bytes] = {}
        # A new number with every change.
        self.revision = next(_REVISIONS)
        self.target: dict[str, Accounts] = {tag: {} for tag in tags}
        # Packed limits by key; the users who are off by theirs, and the accounts that these would have.
        self.limits: dict[str, bytes] = {}
        self.off: set[str] = set()
        self._off_accounts: dict[str, Accounts] = {tag: {} for tag in self.target}
        self._account_of = account_of
        # Per inbound: who holds each credential and address, and who waits for it (rarely any user).
        self._holder: dict[str, dict[bytes, str]] = {tag: {} for tag in self.target}
        self._waiting: dict[str, dict[bytes, dict[str, bytes]]] = {tag: {} for tag in self.target}
        # The claims of each user there.
        self._credential: dict[str, dict[str, bytes]] = {tag: {} for tag in self.target}
        self._addresses: dict[str, dict[str, tuple[bytes, ...]]] = {tag: {} for tag in self.target}

    @classmethod
    def of(
        cls, users: Iterable[User] | Supplied, tags: Iterable[str], account_of: AccountOf, before: Roster | None = None
    ) -> tuple[Roster, list[Refusal]]:
        """Build the roster of a whole set. Returns it and the refusals.

        `before` is one of alike inbounds: accounts of users who are unchanged since are taken from it. It is not
        modified, and is itself returned if the set and `account_of` are the same.
        """
        roster = cls(tags, account_of)
        supplied = users if isinstance(users, Supplied) else Supplied.of(users)
        supplied, refused = supplied.within(roster.known), supplied.refused
        if before and before._account_of == account_of and _alike(before.users, supplied.packed):
            # The same objects: others hold references to them.
            return before, refused + before._refusals_of(supplied)
        if before:
            copy = before._keeping(supplied.packed, account_of)
            conflicts = copy._fill(supplied)
            if not copy.contested:
                return copy, refused + conflicts
        return roster, refused + roster._fill(supplied)

    def updated(self, users: Iterable[User]) -> tuple[Roster, list[Refusal]]:
        """A copy with these users added, changed or removed, as by `put_all`."""
        copy = self._keeping(self.users, self._account_of)
        _, refused = copy.put_all(users)
        return copy, refused

    def _keeping(self, stored: Mapping[str, bytes], account_of: AccountOf) -> Roster:
        """A copy with only those users who are unchanged in `stored`."""
        copy = Roster((), account_of)
        copy.users, copy.limits, copy.off = dict(self.users), dict(self.limits), set(self.off)
        copy._off_accounts = _copied(self._off_accounts)
        copy.target, copy._credential = _copied(self.target), _copied(self._credential)
        copy._addresses, copy._holder = _copied(self._addresses), _copied(self._holder)
        copy._waiting = {tag: _copied(waiting) for tag, waiting in self._waiting.items()}
        for key, packed in self.users.items():
            if stored.get(key) != packed:
                copy.remove(key)
        return copy

    def _fill(self, supplied: Supplied) -> list[Refusal]:
        """Add the users of a set who are not here yet. Returns the refusals of the whole set."""
        refused: list[Refusal] = []
        for key, user, tags in zip(supplied.packed, supplied.users, supplied.tags, strict=True):
            if key not in self.users:
                self._enter(key, user, tags, refused)
            else:
                refused += self._refusals(key, user, tags)
        self.users, self.limits = supplied.packed, supplied.limits
        return refused

    def _refusals_of(self, supplied: Supplied) -> list[Refusal]:
        """The refusals, if the supplied users equal this roster."""
        rows = zip(supplied.packed, supplied.users, supplied.tags, strict=True)
        return [refusal for key, user, tags in rows for refusal in self._refusals(key, user, tags)]

    def known(self, tags: Tags) -> Tags:
        """Select the inbounds that the roster has, without duplicates."""
        return tuple(tag for tag in dict.fromkeys(tags) if tag in self.target)

    @property
    def contested(self) -> bool:
        """Whether several users claim the same credential or address: only then their order matters."""
        return any(any(waiting.values()) for waiting in self._waiting.values())

    def put(self, user: User) -> tuple[set[tuple[str, str]], list[Refusal]]:
        """Add, change or (with no known inbound) remove a user. Returns the (tag, key) pairs touched, and refusals."""
        email = user.email
        try:
            limits = check(user)
        except Unusable as error:
            return set(), [Refusal(email, str(error))]
        key, named = key_of(email), tuple(user.inbounds)
        tags = self.known(named)
        if not tags:
            return self.remove(key), []
        packed = normal(user, named).SerializeToString()
        if self.users.get(key) == packed:
            return set(), self._refusals(key, user, tags)
        touched, refused = self.remove(key), list[Refusal]()
        self.users[key] = packed
        if limits:
            self.limits[key] = limits
        self.revision = next(_REVISIONS)
        self._enter(key, user, tags, refused)
        touched.update((tag, key) for tag in tags if key in self._credential[tag])
        return touched, refused

    def put_all(self, users: Iterable[User]) -> tuple[set[tuple[str, str]], list[Refusal]]:
        """Put several users as one change: refusals are decided when all of them are in."""
        refused: list[Refusal] = []
        touched: set[tuple[str, str]] = set()
        doubtful: list[User] = []
        for user in one_spelling(users, refused).values():
            pairs, bad = self.put(user)
            touched |= pairs
            if bad:
                doubtful.append(user)
        for user in doubtful:
            _, bad = self.put(user)
            refused += bad
        return touched, refused

    def remove(self, key: str) -> set[tuple[str, str]]:
        """Remove a user. Returns the (tag, key) pairs touched, also those of users who come in by that."""
        if self.users.pop(key, None) is None:
            return set()
        self.limits.pop(key, None)
        self.revision = next(_REVISIONS)
        touched = set()
        for tag in self.target:
            touched |= self._release(tag, key)
        return touched

    def tags_of(self, key: str) -> Tags:
        """The inbounds for which the user has a credential."""
        return tuple(tag for tag, credentials in self._credential.items() if key in credentials)

    def keep_out(self, keys: AbstractSet[str]) -> set[tuple[str, str]]:
        """Turn these users off and all others on. Returns the (tag, key) pairs touched."""
        touched = set[tuple[str, str]]()
        for key in self.off - keys:
            touched |= self.turn(key, off=False)
        for key in keys - self.off:
            touched |= self.turn(key, off=True)
        return touched

    def turn(self, key: str, off: bool) -> set[tuple[str, str]]:
        """Turn a user off, or on again. Returns the (tag, key) pairs touched."""
        if off == (key in self.off):
            return set()
        (self.off.add if off else self.off.discard)(key)
        self.revision = next(_REVISIONS)
        here, there = (self.target, self._off_accounts) if off else (self._off_accounts, self.target)
        touched = {(tag, key) for tag, accounts in here.items() if key in accounts}
        for tag, _ in touched:
            there[tag][key] = here[tag].pop(key)
        return touched

    def _grant(self, tag: str, key: str, packed: bytes) -> None:
        """Give an account to a user who holds all of their claims; while they are off it is kept aside."""
        (self._off_accounts if key in self.off else self.target)[tag][key] = packed

    def _has(self, tag: str, key: str) -> bool:
        return key in self.target[tag] or key in self._off_accounts[tag]

    def _enter(self, key: str, user: User, tags: Iterable[str], refused: list[Refusal]) -> None:
        """Build and claim the accounts of a user who has none."""
        for tag in tags:
            if (account := self._account(tag, user, refused)) is not None:
                self._claim(tag, key, account, refused, user)

    def _account(self, tag: str, user: User, refused: list[Refusal]) -> Account | None:
        """Build the user's account for an inbound; None without one, and if it is refused (added to `refused`)."""
        try:
            return self._account_of(tag, user)
        except Unusable as error:
            refused.append(Refusal(user.email, f"{tag}: {error}"))
            return None

    def _claim(self, tag: str, key: str, account: Account, refused: list[Refusal], user: User) -> None:
        packed, credential, addresses = account
        self._credential[tag][key] = credential
        if addresses:
            self._addresses[tag][key] = addresses
        holder = self._holder[tag]
        if not addresses and holder.setdefault(credential, key) == key:
            self._grant(tag, key, packed)
            return
        lost = [claim for claim in (credential, *addresses) if holder.setdefault(claim, key) != key]
        if not lost:
            self._grant(tag, key, packed)
            return
        for claim in lost:
            self._waiting[tag].setdefault(claim, {})[key] = packed
        refused.append(self._taken(tag, key, user.email))

    def _claims(self, tag: str, key: str) -> tuple[bytes, ...]:
        """The credential and addresses that the user claims in this inbound."""
        credential = self._credential[tag].get(key)
        return () if credential is None else (credential, *self._addresses[tag].get(key, ()))

    def _taken(self, tag: str, key: str, email: str) -> Refusal:
        """The refusal of a user who waits: who holds the credential or address that they claim."""
        holder = self._holder[tag]
        claim = next(claim for claim in self._claims(tag, key) if holder[claim] != key)
        what = "credential" if claim == self._credential[tag][key] else f"address {ip_address(claim)}"
        return Refusal(email, f"{tag}: {holder[claim]!r} has the same {what}")

    def _release(self, tag: str, key: str) -> set[tuple[str, str]]:
        holder, claims = self._holder[tag], self._claims(tag, key)
        self._credential[tag].pop(key, None)
        self._addresses[tag].pop(key, None)
        self._off_accounts[tag].pop(key, None)
        touched = {(tag, key)} if self.target[tag].pop(key, None) is not None else set()
        for claim in claims:
            waiting = self._waiting[tag].get(claim, {})
            if holder[claim] != key:
                del waiting[key]
            else:
                del holder[claim]
                if waiting:
                    touched |= self._inherit(tag, claim, waiting)
            if not waiting:
                # Empty entries would be copied with each change of users.
                self._waiting[tag].pop(claim, None)
        return touched

    def _inherit(self, tag: str, claim: bytes, waiting: dict[str, bytes]) -> set[tuple[str, str]]:
        """Give a free claim to the first user who waits for it; they come in if they hold all of their claims now."""
        heir = next(iter(waiting))
        packed = waiting.pop(heir)
        holder = self._holder[tag]
        holder[claim] = heir
        if any(holder[each] != heir for each in self._claims(tag, heir)):
            return set()
        self._grant(tag, heir, packed)
        return {(tag, heir)}

    def _refusals(self, key: str, user: User, tags: Iterable[str]) -> list[Refusal]:
        """The refusals of an unchanged user: they are reported each time the user is supplied."""
        refused: list[Refusal] = []
        for tag in tags:
            if not self._has(tag, key) and self._account(tag, user, refused) is not None:
                refused.append(self._taken(tag, key, user.email))
        return refused

    def outside(self, key: str, user: User) -> Iterator[str]:
        """Yield, for each inbound that the user names but is not in the target of, the inbound and the reason."""
        for tag in self.known(tuple(user.inbounds)):
            if key in self._off_accounts[tag]:
                yield f"{tag}: the user is off, by their limits"
            elif key not in self.target[tag]:
                refused = self._refusals(key, user, (tag,))
                yield refused[0].reason if refused else f"{tag}: the user has no credential for it"


class Ahead:
    """The roster of a saved backend, built before the node resumes it: then only changes are left to apply.

    `roster` has the users of the last `catch_up`: `users`, as they were saved. `refused` are the refusals.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.roster = Roster(plan.tags, plan.account)
        self.users: Sequence[bytes] = ()
        self.refused: list[Refusal] = []
        self._doubtful: set[bytes] = set()

    def catch_up(self, users: Sequence[bytes]) -> None:
        """Make it the roster of these users; only those who are new or changed are built.

        One message at a time: all of them would take much memory beside another node.
        """
        if [*self.roster.users.values()] == [*users]:
            self.users = users
            return
        known = {packed: key for key, packed in self.roster.users.items()}
        kept = {known[packed] for packed in users if packed in known}
        for key in known.values():
            if key not in kept:
                self.roster.remove(key)
        looked_at = [packed for packed in users if packed not in known or packed in self._doubtful]
        self._doubtful = {packed for packed in looked_at if self.roster.put(User.FromString(packed))[1]}
        self.users, self.refused = users, []
        # Refusals are decided when all users are in, as some may have left.
        for packed in looked_at:
            if packed in self._doubtful:
                self.refused += self.roster.put(User.FromString(packed))[1]


class Limiter:
    """Decides which users are off by their limits: see `node.limits`. This one turns off no user."""

    def learn(self, limits: Collection[bytes]) -> None:
        """Parse these packed limits, which are about to be installed. Called in a pool thread for large sets."""

    def install(self, limits: Mapping[str, bytes], users: Collection[str]) -> AbstractSet[str]:
        """Take over all users and the packed limits of those who have some. Returns the users who are off.

        Both arguments are live: they change as the users do.
        """
        return frozenset()

    def follow(self, key: str) -> bool:
        """Look again at a user who was added, changed or removed. Returns whether they are off."""
        return False


def _alike(users: Mapping[str, bytes], others: Mapping[str, bytes]) -> bool:
    """Whether both have the same entries in the same order."""
    return users == others and [*users] == [*others]


def _copied(dicts: Mapping[K, Mapping[L, V]]) -> dict[K, dict[L, V]]:
    return {key: dict(one) for key, one in dicts.items()}


def changed_users(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """The differences between two sets of users, by key: the new entry, or None for a user who is gone."""
    changed: dict[str, bytes | None] = {key: None for key in before if key not in after}
    changed |= {key: packed for key, packed in after.items() if before.get(key) != packed}
    return changed
