"""Users as controllers supply them, read as far as nothing needs to be known of the backend. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from node.contract.accounts import Refusal, Unusable, key_of
from node.contract.limits import fault_of
from protos.service_pb2 import User

Tags = tuple[str, ...]


class Supplied(NamedTuple):
    """The users of a whole set, in stored order: as they are kept by key, as they came, and the inbounds they name.

    `refused` are those who cannot be in any set. `limits` are what some of them say of limits, packed.
    """

    packed: dict[str, bytes]
    users: list[User]
    tags: list[Tags]
    refused: list[Refusal]
    limits: dict[str, bytes]

    @classmethod
    def of(cls, users: Iterable[User]) -> Supplied:
        """Of two entries with one e-mail the last wins."""
        supplied = cls({}, [], [], [], {})
        for key, user in one_spelling(users, supplied.refused).items():
            try:
                check(user)
            except Unusable as error:
                supplied.refused.append(Refusal(user.email, str(error)))
                continue
            # A slice, since going through them takes twice as long.
            tags = tuple(user.inbounds[:])
            supplied.packed[key] = normal(user, tags).SerializeToString()
            supplied.users.append(user)
            supplied.tags.append(tags)
            if limits := limits_said(user):
                supplied.limits[key] = limits
        return supplied

    def within(self, known: Callable[[Tags], Tags]) -> Supplied:
        """Those who name known inbounds, and these only."""
        known = lru_cache(known)
        tags = [known(named) for named in self.tags]
        if all(tags):
            return self._replace(tags=tags)
        rows = [row for row in zip(self.packed.items(), self.users, tags, strict=True) if row[2]]
        packed = dict(row[0] for row in rows)
        limits = {key: said for key, said in self.limits.items() if key in packed}
        return Supplied(packed, [row[1] for row in rows], [row[2] for row in rows], self.refused, limits)


def check(user: User) -> None:
    """Raises `Unusable` for a name that could not be removed, listed or told apart, and limits that cannot be."""
    email = user.email
    if user.HasField("limits") and (fault := fault_of(user.limits)):
        raise Unusable(fault)
    if not email:
        raise Unusable("the e-mail is empty")
    if not email.isprintable() or ">>>" in email:
        raise Unusable("the e-mail has characters that cannot be told apart in counters and logs")


def limits_said(user: User) -> bytes:
    """What a user says of limits, packed; nothing where that is nothing."""
    return user.limits.SerializeToString(deterministic=True) if user.HasField("limits") else b""


def normal(user: User, tags: Tags) -> User:
    """The user with their inbounds (`tags`) in order and once each: controllers send them in any."""
    if len(tags) == 1 or tags == (ordered := tuple(sorted(set(tags)))):
        return user
    kept = User(email=user.email, inbounds=ordered)
    kept.proxies.CopyFrom(user.proxies)
    if user.HasField("limits"):
        kept.limits.CopyFrom(user.limits)
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
