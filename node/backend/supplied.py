"""Parses and validates the users that controllers supply, as far as that needs no backend. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from node.contract.accounts import Refusal, Unusable, key_of
from node.contract.limits import fault_of
from protos.service_pb2 import User

Tags = tuple[str, ...]


class Supplied(NamedTuple):
    """The valid users of a whole set, in stored order: serialised by key, as messages, and the inbounds they name.

    `refused` are the invalid ones. `limits`: packed limits by key, of users who have some.
    """

    packed: dict[str, bytes]
    users: list[User]
    tags: list[Tags]
    refused: list[Refusal]
    limits: dict[str, bytes]

    @classmethod
    def of(cls, users: Iterable[User]) -> Supplied:
        """Parse a whole set. Of two entries with one e-mail the last wins."""
        packed, kept, named, refused, limits = supplied = cls({}, [], [], [], {})
        # Users name the same few inbounds: one tuple for all who name the same.
        same: dict[Tags, Tags] = {}
        # A list: the messages' Python objects are side by side then, and free whole blocks of memory when they go.
        for key, user in one_spelling(list(users), refused).items():
            try:
                own = check(user)
            except Unusable as error:
                refused.append(Refusal(user.email, str(error)))
                continue
            # A slice: iterating takes twice as long.
            tags = tuple(user.inbounds[:])
            packed[key] = normal(user, tags).SerializeToString()
            kept.append(user)
            named.append(same.setdefault(tags, tags))
            if own:
                limits[key] = own
        return supplied

    def within(self, known: Callable[[Tags], Tags]) -> Supplied:
        """The users who name known inbounds, with only those inbounds."""
        known = lru_cache(known)
        tags = [known(named) for named in self.tags]
        if all(tags):
            return self._replace(tags=tags)
        rows = [row for row in zip(self.packed.items(), self.users, tags, strict=True) if row[2]]
        packed = dict(row[0] for row in rows)
        limits = {key: some for key, some in self.limits.items() if key in packed}
        return Supplied(packed, [row[1] for row in rows], [row[2] for row in rows], self.refused, limits)


def check(user: User) -> bytes:
    """Return the user's limits, serialised; empty without limits.

    Raises `Unusable` for an e-mail that counters, logs or lists could not hold, and for impossible limits.
    """
    email, limits = user.email, b""
    if user.HasField("limits"):
        if fault := fault_of(user.limits):
            raise Unusable(fault)
        limits = user.limits.SerializeToString(deterministic=True)
    if not email:
        raise Unusable("the e-mail is empty")
    if not email.isprintable() or ">>>" in email:
        raise Unusable("the e-mail has unprintable characters or >>>, which counters and logs cannot hold")
    return limits


def normal(user: User, tags: Tags) -> User:
    """The user with their inbounds (`tags`) sorted and without duplicates: controllers send them in any order."""
    if len(tags) == 1 or tags == (ordered := tuple(sorted(set(tags)))):
        return user
    kept = User(email=user.email, inbounds=ordered)
    kept.proxies.CopyFrom(user.proxies)
    if user.HasField("limits"):
        kept.limits.CopyFrom(user.limits)
    return kept


def one_spelling(users: Iterable[User], refused: list[Refusal]) -> dict[str, User]:
    """The last entry of each e-mail, by key. Entries with another spelling than the first go to `refused`."""
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
