"""The desired users, pure: who may use which inbound, and whose a credential is.

A user is kept as the serialised message: at 100,000 users objects would cost hundreds of megabytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from ipaddress import ip_address
from itertools import count
from typing import NamedTuple, TypeVar

from node.contract.accounts import Account, AccountOf, Accounts, Refusal, Unusable, key_of
from protos.service_pb2 import User

K = TypeVar("K")
L = TypeVar("L")
V = TypeVar("V")

Tags = tuple[str, ...]


# No number comes again, also after the node's next start.
_REVISIONS = count(secrets.randbits(62))


class Supplied(NamedTuple):
    """The users of a whole set, in stored order: as they are kept by key, as they came, and the inbounds they name.

    `refused` are those who cannot be in any set.
    """

    packed: dict[str, bytes]
    users: list[User]
    tags: list[Tags]
    refused: list[Refusal]

    @classmethod
    def of(cls, users: Iterable[User]) -> Supplied:
        """Of two entries with one e-mail the last wins."""
        supplied = cls({}, [], [], [])
        for key, user in one_spelling(users, supplied.refused).items():
            try:
                check_email(user.email)
            except Unusable as error:
                supplied.refused.append(Refusal(user.email, str(error)))
                continue
            # A slice, since going through them takes twice as long.
            tags = tuple(user.inbounds[:])
            supplied.packed[key] = normal(user, tags).SerializeToString()
            supplied.users.append(user)
            supplied.tags.append(tags)
        return supplied

    def within(self, known: Callable[[Tags], Tags]) -> Supplied:
        """Those who name known inbounds, and these only."""
        known = lru_cache(known)
        tags = [known(named) for named in self.tags]
        if all(tags):
            return self._replace(tags=tags)
        rows = [row for row in zip(self.packed.items(), self.users, tags, strict=True) if row[2]]
        return Supplied(dict(row[0] for row in rows), [row[1] for row in rows], [row[2] for row in rows], self.refused)


def check_email(email: str) -> None:
    """Raises `Unusable` for a name that could not be removed, listed or told apart in logs and counters."""
    if not email:
        raise Unusable("the e-mail is empty")
    if not email.isprintable() or ">>>" in email:
        raise Unusable("the e-mail has characters that cannot be told apart in counters and logs")


class Roster:
    """The desired users, and the accounts that follow from them.

    Credentials, and addresses in a tunnel, are unique inside an inbound: of those who claim one the first in stored
    order has it, and a user who does not have all that they claim is not in. A user whose accounts change moves to the
    end of that order: one rule for one change, for a whole set and after a restart.
    """

    def __init__(self, tags: Iterable[str], account_of: AccountOf) -> None:
        self.users: dict[str, bytes] = {}
        # Another one whenever the users are others.
        self.revision = next(_REVISIONS)
        self.target: dict[str, Accounts] = {tag: {} for tag in tags}
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
            return before, refused + before._fill(supplied)
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
        copy.users = dict(self.users)
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
        self.users = supplied.packed
        return refused

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
            check_email(email)
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
        self.revision = next(_REVISIONS)
        touched = set()
        for tag in self.target:
            touched |= self._release(tag, key)
        return touched

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
            self.target[tag][key] = packed
            return
        lost = [claim for claim in (credential, *addresses) if holder.setdefault(claim, key) != key]
        if not lost:
            self.target[tag][key] = packed
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
        self.target[tag][heir] = packed
        return {(tag, heir)}

    def _refusals(self, key: str, user: User, tags: Iterable[str]) -> list[Refusal]:
        """What an unchanged user was refused: it is told again each time they are supplied."""
        refused: list[Refusal] = []
        for tag in tags:
            if key not in self.target[tag] and self._account(tag, user, refused) is not None:
                refused.append(self._taken(tag, key, user.email))
        return refused

    def outside(self, key: str, user: User) -> Iterator[str]:
        """Why this user of the roster is not wanted in inbounds that they name: each inbound and the reason."""
        for tag in self.known(tuple(user.inbounds)):
            if key not in self.target[tag]:
                refused = self._refusals(key, user, (tag,))
                yield refused[0].reason if refused else f"{tag}: the user has no credential for it"


def _alike(users: Mapping[str, bytes], others: Mapping[str, bytes]) -> bool:
    """Whether they are the same, in the same order."""
    return users == others and [*users] == [*others]


def _copied(dicts: Mapping[K, Mapping[L, V]]) -> dict[K, dict[L, V]]:
    return {key: dict(one) for key, one in dicts.items()}


def normal(user: User, tags: Tags) -> User:
    """The user with their inbounds (`tags`) in order and once each: controllers send them in any."""
    if len(tags) == 1 or tags == (ordered := tuple(sorted(set(tags)))):
        return user
    kept = User(email=user.email, inbounds=ordered)
    kept.proxies.CopyFrom(user.proxies)
    return kept


def one_spelling(users: Iterable[User], refused: list[Refusal]) -> dict[str, User]:
    """By key one entry an e-mail, the last, where it is spelled as at first; other spellings go to `refused`."""
    chosen: dict[str, User] = {}
    for user in users:
        email = user.email
        key = key_of(email)
        first = chosen.get(key)
        if first is not None and first.email != email:
            refused.append(Refusal(email, f"another spelling of {first.email!r}"))
        else:
            chosen[key] = user
    return chosen


def changed_users(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """What turns one set of users into the other, by key: the new entry, or None for a user who is gone."""
    changed: dict[str, bytes | None] = {key: None for key in before if key not in after}
    changed |= {key: packed for key, packed in after.items() if before.get(key) != packed}
    return changed
