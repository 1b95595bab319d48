"""Rows of a ledger, for comparisons."""

from __future__ import annotations

from node.contract.counters import Row, Scope
from node.traffic.ledger import Ledger, SetAside


def pending(ledger: Ledger, scope: Scope) -> list[Row]:
    """The rows that a request for this scope would get."""
    return [Row(scope, *row) for row in zip(*ledger.listed(scope), strict=True)]


def put_aside(taken: SetAside) -> list[Row]:
    """The rows put aside for a reply, users by key."""
    return [Row(taken.scope, key, *taken.sums.both(key)) for key in taken.sums.names]
