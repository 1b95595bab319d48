"""The desired users, pure: who may use which inbound, and whose a credential is.

A user is kept as the serialised message: at 100,000 users objects would cost hundreds of megabytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from ipaddress import ip_address
from itertools import count
from typing import TypeVar

from node.backend.supplied import Supplied, Tags, check, limits_said, normal, one_spelling
from node.contract.accounts import Account, AccountOf, Accounts, Refusal, Unusable, key_of
from protos.service_pb2 import User

K = TypeVar("K")
L = TypeVar("L")
V = TypeVar("V")

# No number comes again, also after the node's next start.
_REVISIONS = count(secrets.randbits(62))


class Roster:
    """The desired users, and the accounts that follow from them.

    Credentials, and addresses in a tunnel, are unique inside an inbound: of those who claim one the first in stored
    order has it, and a user who does not have all that they claim is not in. A user whose accounts change moves to the
    end of that order: one rule for one change, for a whole set and after a restart. Who is `off` is wanted, keeps what
    they claim, and is not in the target.
    """

    def __init__(self, tags: Iterable[str], account_of: AccountOf) -> None:
        self.users: dict[str, bytes] = {}
        # Another one whenever the users are others.
        self.revision = next(_REVISIONS)
        self.target: dict[str, Accounts] = {tag: {} for tag in tags}
        # What users say of limits, packed; and who is off by theirs, with the accounts that they would have.
        self.limits: dict[str, bytes] = {}
        self.off: set[str] = set()
        self._idle: dict[str, Accounts] = {tag: {} for tag in self.target}
        self._account_of = account_of
        # Per inbound: whose each credential and address is, and who waits behind them (rarely anybody).
        self._holder: dict[str, dict[bytes, str]] = {tag: {} for tag in self.target}
        self._waiting: dict[str, dict[bytes, dict[str, bytes]]] = {tag: {} for tag in self.target}
        # What each user claims there.
        self._credential: dict[str, dict[str, bytes]] = {tag: {} for tag in self.target}
        self._addresses: dict[str, dict[str, tuple[bytes, ...]]] = {tag: {} for tag in self.target}

    @classmethod
    def of(
        cls, users: Iterable[User] | Supplied, tags: Iterable[str], account_of: AccountOf, before: Roster | None = None
    ) -> tuple[Roster, list[Refusal]]:
        """The roster of a whole set, and who of it could not be used.

        `before` is one of alike inbounds: only accounts of users who are not in it as they are now are built. It is
        not changed, and is itself returned where the set and `account_of` are the same.
        """
        roster = cls(tags, account_of)
        supplied = users if isinstance(users, Supplied) else Supplied.of(users)
        supplied, refused = supplied.within(roster.known), supplied.refused
        if before and before._account_of == account_of and _alike(before.users, supplied.packed):
            # Nothing of it becomes another object: others look at what is there.
            return before, refused + before._doubts(supplied)
        if before:
            helped = before._keeping(supplied.packed, account_of)
            doubts = helped._fill(supplied)
            if not helped.contested:
                return helped, refused + doubts
        return roster, refused + roster._fill(supplied)

    def updated(self, users: Iterable[User]) -> tuple[Roster, list[Refusal]]:
        """A copy with these users added, changed or removed, as by `put_all`."""
        copy = self._keeping(self.users, self._account_of)
        _, refused = copy.put_all(users)
        return copy, refused

    def _keeping(self, stored: Mapping[str, bytes], account_of: AccountOf) -> Roster:
        """A copy without those who are not in `stored` as they are here."""
        copy = Roster((), account_of)
        copy.users, copy.limits, copy.off = dict(self.users), dict(self.limits), set(self.off)
        copy._idle = _copied(self._idle)
        copy.target, copy._credential = _copied(self.target), _copied(self._credential)
        copy._addresses, copy._holder = _copied(self._addresses), _copied(self._holder)
        copy._waiting = {tag: _copied(waiting) for tag, waiting in self._waiting.items()}
        for key, packed in self.users.items():
            if stored.get(key) != packed:
                copy.remove(key)
        return copy

    def _fill(self, supplied: Supplied) -> list[Refusal]:
        """Take in those of a set who are not here yet. Returns which users of the set cannot be used."""
        refused: list[Refusal] = []
        for key, user, tags in zip(supplied.packed, supplied.users, supplied.tags, strict=True):
            if key not in self.users:
                self._enter(key, user, tags, refused)
            else:
                refused += self._refusals(key, user, tags)
        self.users, self.limits = supplied.packed, supplied.limits
        return refused

    def _doubts(self, supplied: Supplied) -> list[Refusal]:
        """Which users of a set that is this one cannot be used."""
        rows = zip(supplied.packed, supplied.users, supplied.tags, strict=True)
        return [refusal for key, user, tags in rows for refusal in self._refusals(key, user, tags)]

    def known(self, tags: Tags) -> Tags:
        """Of these inbounds those that are here, each once."""
        return tuple(tag for tag in dict.fromkeys(tags) if tag in self.target)

    @property
    def contested(self) -> bool:
        """Whether several claim the same: only then it matters in which order they came."""
        return any(any(waiting.values()) for waiting in self._waiting.values())

    def put(self, user: User) -> tuple[set[tuple[str, str]], list[Refusal]]:
        """Add, change or (with no known inbound) remove a user: the (tag, key) pairs touched, and what was refused."""
        email = user.email
        try:
            check(user)
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
        if limits := limits_said(user):
            self.limits[key] = limits
        self.revision = next(_REVISIONS)
        self._enter(key, user, tags, refused)
        touched.update((tag, key) for tag in tags if key in self._credential[tag])
        return touched, refused

    def put_all(self, users: Iterable[User]) -> tuple[set[tuple[str, str]], list[Refusal]]:
        """The same for several users as one change: what was refused is judged when all of them are in."""
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
        """Forget a user: the (tag, key) pairs touched, with those of users who get in by that."""
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
        """These and no others are off. Returns the (tag, key) pairs touched."""
        touched = set[tuple[str, str]]()
        for key in self.off - keys:
            touched |= self.turn(key, off=False)
        for key in keys - self.off:
            touched |= self.turn(key, off=True)
        return touched

    def turn(self, key: str, off: bool) -> set[tuple[str, str]]:
        """This user is off from now on, or is not. Returns the (tag, key) pairs touched."""
        if off == (key in self.off):
            return set()
        (self.off.add if off else self.off.discard)(key)
        self.revision = next(_REVISIONS)
        here, there = (self.target, self._idle) if off else (self._idle, self.target)
        touched = {(tag, key) for tag, accounts in here.items() if key in accounts}
        for tag, _ in touched:
            there[tag][key] = here[tag].pop(key)
        return touched

    def _grant(self, tag: str, key: str, packed: bytes) -> None:
        """The user has all that they claim there."""
        (self._idle if key in self.off else self.target)[tag][key] = packed

    def _has(self, tag: str, key: str) -> bool:
        return key in self.target[tag] or key in self._idle[tag]

    def _enter(self, key: str, user: User, tags: Iterable[str], refused: list[Refusal]) -> None:
        """Give a user who has no accounts theirs."""
        for tag in tags:
            account = self._account(tag, user, refused)
            if account is not None:
                self._claim(tag, key, account, refused, user.email)

    def _account(self, tag: str, user: User, refused: list[Refusal]) -> Account | None:
        """The user's account for an inbound, if there is one; why it cannot be used goes to `refused`."""
        try:
            return self._account_of(tag, user)
        except Unusable as error:
            refused.append(Refusal(user.email, f"{tag}: {error}"))
            return None

    def _claim(self, tag: str, key: str, account: Account, refused: list[Refusal], email: str) -> None:
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
        refused.append(self._taken(tag, key, email))

    def _claims(self, tag: str, key: str) -> tuple[bytes, ...]:
        """What this user wants for themselves alone."""
        credential = self._credential[tag].get(key)
        return () if credential is None else (credential, *self._addresses[tag].get(key, ()))

    def _taken(self, tag: str, key: str, email: str) -> Refusal:
        """Who has something of this user's, who waits."""
        holder = self._holder[tag]
        claim = next(claim for claim in self._claims(tag, key) if holder[claim] != key)
        what = "credential" if claim == self._credential[tag][key] else f"address {ip_address(claim)}"
        return Refusal(email, f"{tag}: {holder[claim]!r} has the same {what}")

    def _release(self, tag: str, key: str) -> set[tuple[str, str]]:
        holder, claims = self._holder[tag], self._claims(tag, key)
        self._credential[tag].pop(key, None)
        self._addresses[tag].pop(key, None)
        self._idle[tag].pop(key, None)
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
                # Each change of users copies all that is left here.
                self._waiting[tag].pop(claim, None)
        return touched

    def _inherit(self, tag: str, claim: bytes, waiting: dict[str, bytes]) -> set[tuple[str, str]]:
        """Give what is free to the first who waits for it, who is in when they have all that they claim."""
        heir = next(iter(waiting))
        packed = waiting.pop(heir)
        holder = self._holder[tag]
        holder[claim] = heir
        if any(holder[each] != heir for each in self._claims(tag, heir)):
            return set()
        self._grant(tag, heir, packed)
        return {(tag, heir)}

    def _refusals(self, key: str, user: User, tags: Iterable[str]) -> list[Refusal]:
        """What an unchanged user was refused: it is told again each time they are supplied."""
        refused: list[Refusal] = []
        for tag in tags:
            if not self._has(tag, key) and self._account(tag, user, refused) is not None:
                refused.append(self._taken(tag, key, user.email))
        return refused

    def outside(self, key: str, user: User) -> Iterator[str]:
        """Why this user of the roster is not wanted in inbounds that they name: each inbound and the reason."""
        for tag in self.known(tuple(user.inbounds)):
            if key in self._idle[tag]:
                yield f"{tag}: the user is off, by their limits"
            elif key not in self.target[tag]:
                refused = self._refusals(key, user, (tag,))
                yield refused[0].reason if refused else f"{tag}: the user has no credential for it"


def _alike(users: Mapping[str, bytes], others: Mapping[str, bytes]) -> bool:
    """Whether they are the same, in the same order."""
    return users == others and [*users] == [*others]


def _copied(dicts: Mapping[K, Mapping[L, V]]) -> dict[K, dict[L, V]]:
    return {key: dict(one) for key, one in dicts.items()}


def changed_users(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """What turns one set of users into the other, by key: the new entry, or None for a user who is gone."""
    changed: dict[str, bytes | None] = {key: None for key in before if key not in after}
    changed |= {key: packed for key, packed in after.items() if before.get(key) != packed}
    return changed
