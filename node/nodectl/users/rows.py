"""What a row of `ListUsers` says, in a word and for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from node.contract.accounts import key_of
from node.nodectl.users.difference import said
from protos import service_pb2 as pb

# How the node says that a user is out for a limit.
OFF = "the user is off, by their limits"
WIDE = ("confirmed", "leaving", "unknown", "credentials")
COLUMNS = ("name", "inbounds", "state", "why")


def settled(row: pb.ListedUser) -> bool:
    """The core has confirmed all that is wanted of this user, and nothing else."""
    return set(row.inbounds) == set(row.confirmed) and not (row.leaving or row.pending or row.shortened)


def state_of(row: pb.ListedUser) -> str:
    """In a word."""
    states = (
        (row.shortened, "unknown"),
        (row.pending, "pending"),
        (row.leaving, "leaving"),
        (any(OFF in reason for reason in row.refused), "off"),
        (settled(row), "confirmed"),
        (row.confirmed, "partly"),
        (row.refused, "refused"),
    )
    return next((word for holds, word in states if holds), "unconfirmed")


def cells(row: pb.ListedUser, wide: bool = False) -> Sequence[str]:
    """The row as `COLUMNS` has it, and `WIDE` behind it."""
    short = (row.name, _listed(row.inbounds), state_of(row), "; ".join(row.refused))
    more = (_listed(row.confirmed), _listed(row.leaving), _listed(row.unknown), " ".join(sorted(said(row.proxies))))
    return short + more if wide else short


def missing(names: Iterable[str], rows: Iterable[pb.ListedUser]) -> list[str]:
    """Of these names those of whom the node has no row."""
    there = {key_of(row.name) for row in rows}
    return [name for name in names if key_of(name) not in there]


def not_in(users: Sequence[pb.User], rows: Sequence[pb.ListedUser]) -> list[tuple[str, str]]:
    """Of these users, whom the node was told, those who are not in as they should be: each with the reason."""
    gone = missing((user.email for user in users), rows)
    told = [(row.name, "; ".join(row.refused) or state_of(row)) for row in rows if not settled(row)]
    return told + [(name, "the node has none of their inbounds, or cannot take the name") for name in gone]


def _listed(tags: Iterable[str]) -> str:
    return ", ".join(tags)
