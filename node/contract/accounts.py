"""Users as the node and a driver speak of them: the accounts of an inbound, and what changes of them. Pure.

Users are keyed by e-mail without regard to case, as Xray does. An account is the bytes that a core takes: at 100,000
users objects would cost hundreds of megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from protos.service_pb2 import User

# A driver's words for one user in one inbound, by lower-case e-mail.
Accounts = dict[str, bytes]


class Account(NamedTuple):
    """A user of one inbound: what the core takes, and what must be theirs alone there.

    That is the credential, and each of the addresses that they have in a tunnel: 4 bytes or 16.
    """

    packed: bytes
    credential: bytes
    addresses: tuple[bytes, ...] = ()


class Unusable(Exception):
    """A user cannot be given to an inbound; the text says why."""


# Builds a user's account for an inbound; None where they have no credential for it. Raises `Unusable`.
AccountOf = Callable[[str, User], Account | None]


class Refusal(NamedTuple):
    """A user that could not be applied, by name, and why."""

    email: str
    reason: str


class Change(NamedTuple):
    """One user of one inbound: the account that they should have, None for none."""

    tag: str
    key: str
    packed: bytes | None


def key_of(email: str) -> str:
    """The key of an e-mail: each character's simple lower case, as Go's strings.ToLower has it."""
    return email.lower() if email.isascii() else "".join(character.lower()[0] for character in email)


def diff(confirmed: Mapping[str, Accounts], target: Mapping[str, Accounts]) -> list[Change]:
    """What turns the confirmed accounts into the target. Equal accounts are not in it."""
    changes = []
    for tag in target:
        have, want = confirmed.get(tag, {}), target[tag]
        if have == want:
            continue  # most often, and much faster told at once
        changes += [Change(tag, key, None) for key in have if key not in want]
        changes += [Change(tag, key, packed) for key, packed in want.items() if have.get(key) != packed]
    return changes


def apply(changes: Iterable[Change], accounts: Mapping[str, Accounts]) -> dict[str, Accounts]:
    """The accounts after the changes; the definition of what a change means."""
    after = {tag: dict(have) for tag, have in accounts.items()}
    for tag, key, packed in changes:
        if packed is None:
            after[tag].pop(key, None)
        else:
            after[tag][key] = packed
    return after
