"""A part of the node that keeps something in the state file."""

from __future__ import annotations

from node.base.part import Part
from node.contract.saved import Changes, Saved


class Lasting(Part):
    """A part whose state outlives the node. It overrides those of these methods that concern it."""

    def restore(self, saved: Saved) -> None:
        """Take over what an earlier node saved: before the start, or later if the disk could not be read then."""

    def save(self, changes: Changes) -> None:
        """Add everything that this part keeps on disk, for an empty state file."""

    def stored(self, changes: Changes) -> None:
        """Note that these changes are on disk."""

    def disk(self, fault: str) -> None:
        """Note that the disk fails or, with an empty text, that it works again."""

    def damaged(self, text: str) -> None:
        """Note that the state file was damaged and moved aside."""
