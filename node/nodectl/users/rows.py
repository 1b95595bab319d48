"""The state of a listed user, and its row in tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from node.contract.accounts import key_of
from node.nodectl.users.difference import proxies_of
from protos import service_pb2 as pb

# The node's reason for a user whom a limit bars.
OFF = "the user is off, by their limits"
WIDE = ("confirmed", "leaving", "unknown", "credentials")
COLUMNS = ("name", "inbounds", "state", "why")


def settled(row: pb.ListedUser) -> bool:
    """Whether the core has confirmed the user in all their inbounds, and in no other."""
    return set(row.inbounds) == set(row.confirmed) and not (row.leaving or row.pending or row.shortened)


def state_of(row: pb.ListedUser) -> str:
    """The state in one word, the most pressing one."""
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
    """A row with the cells of `COLUMNS`, and with `wide` those of `WIDE`."""
    short = (row.name, ", ".join(row.inbounds), state_of(row), "; ".join(row.refused))
    more = (*map(", ".join, (row.confirmed, row.leaving, row.unknown)), " ".join(sorted(proxies_of(row.proxies))))
    return short + more if wide else short


def missing(names: Iterable[str], rows: Iterable[pb.ListedUser]) -> list[str]:
    """The names for which there is no row, in any spelling."""
    there = {key_of(row.name) for row in rows}
    return [name for name in names if key_of(name) not in there]


def not_in(users: Sequence[pb.User], rows: Sequence[pb.ListedUser]) -> dict[str, str]:
    """Which of the users sent to a node the core has not confirmed in all their inbounds, by name, with reasons."""
    gone = missing((user.email for user in users), rows)
    unsettled = {row.name: "; ".join(row.refused) or state_of(row) for row in rows if not settled(row)}
    return unsettled | dict.fromkeys(gone, "the node has none of their inbounds, or refuses the name")
