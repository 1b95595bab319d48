"""Users as the node and a driver exchange them: the accounts of an inbound, and changes of them. Pure.

Users are keyed by e-mail, ignoring case, as Xray does. An account is kept as the bytes that the core takes: 100,000
message objects would cost hundreds of megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from protos.service_pb2 import User

# The accounts of one inbound: the driver's bytes for each user, by lower-case e-mail.
Accounts = dict[str, bytes]


class Account(NamedTuple):
    """A user's account in one inbound: the bytes for the core, and what must be unique there.

    Unique are the credential, and each of the user's addresses in a tunnel (4 or 16 bytes).
    """

    packed: bytes
    credential: bytes
    addresses: tuple[bytes, ...] = ()


class Unusable(Exception):
    """A user cannot have an account in an inbound; the text has the reason."""


# Builds a user's account for an inbound; None without a credential for it. Raises `Unusable`.
AccountOf = Callable[[str, User], Account | None]


class Refusal(NamedTuple):
    """A user who could not be applied: their e-mail and the reason."""

    email: str
    reason: str


class Change(NamedTuple):
    """A change of one user in one inbound: the account that they should have; None removes them."""

    tag: str
    key: str
    packed: bytes | None


def key_of(email: str) -> str:
    """The key of an e-mail: each character's simple lower case, as Go's strings.ToLower has it."""
    return email.lower() if email.isascii() else "".join(character.lower()[0] for character in email)


def diff(confirmed: Mapping[str, Accounts], target: Mapping[str, Accounts]) -> list[Change]:
    """The changes that turn the confirmed accounts into the target, per inbound removals first."""
    changes = []
    for tag in target:
        have, want = confirmed.get(tag, {}), target[tag]
        if have == want:
            continue  # the usual case, and much faster than comparing user by user
        changes += [Change(tag, key, None) for key in have if key not in want]
        changes += [Change(tag, key, packed) for key, packed in want.items() if have.get(key) != packed]
    return changes


def apply(changes: Iterable[Change], accounts: Mapping[str, Accounts]) -> dict[str, Accounts]:
    """A copy of the accounts with the changes applied. This defines what a change means."""
    after = {tag: dict(have) for tag, have in accounts.items()}
    for tag, key, packed in changes:
        if packed is None:
            after[tag].pop(key, None)
        else:
            after[tag][key] = packed
    return after
