"""Protocols for drivers whose cores go on when one node process follows another."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from node.contract.driver import Driver, Generation, Plan


class NotNow(Exception):
    """The runs cannot be handed over at this moment, but later; the text has the reason."""


class Gone(Exception):
    """The handed-over run has ended meanwhile; the text has the reason."""


@runtime_checkable
class Leaves(Generation, Protocol):
    """A generation whose core the next node can go on with."""

    async def leave(self) -> None:
        """Stop reading its output, which waits for the next node. Raises `errors.CoreFailed`."""

    @property
    def counts_in_node(self) -> bool:
        """Whether the node adds up its counters: what it has added since `packed` ends with a node that is killed."""

    def packed(self, exact: bool) -> bytes:
        """Pack the run for the next node, for `LeavesAll.recover`. Raises `errors.CoreFailed`.

        `exact`: after `leave`, all of it. Otherwise what the next node can find out, if slowly, is left out.
        """

    def stay(self) -> None:
        """Read its output again: the hand-over did not happen, or is complete."""


@runtime_checkable
class LeavesAll(Driver, Protocol):
    """A driver of a core whose runs can be handed over: see `Leaves`."""

    def rehearse(self, begin: bool) -> None:
        """Begin or end keeping the executable's answers, for the next program, which would ask the same again."""

    async def leave(self) -> bytes:
        """Pack the state that all runs share, after the runs themselves; the keeper has their sockets."""

    def go_on(self, packed: bytes) -> None:
        """Take over what `leave` returned, if anything; before a run is recovered. Raises `errors.CoreFailed`."""

    async def recover(self, plan: Plan, left: bytes, exact: bool) -> Leaves:
        """Take over a handed-over run of this very configuration. Raises `Gone` and `errors.CoreFailed`.

        `exact`: as in `Leaves.packed`. Its output is not read until `stay` is called.
        """

    async def remain(self, pids: Collection[int], lead: int | None) -> None:
        """Note which runs are recovered and live; the others have ended. Raises `errors.CoreFailed`.

        `lead`: the run that new connections are directed to again; None after an exact hand-over.
        """
