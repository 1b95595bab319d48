"""The users of a file while it is read: who is in it, who is left out, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from node.contract.accounts import key_of
from protos import service_pb2 as pb

# Faults that are told at once.
LISTED = 20


@dataclass(frozen=True)
class Entry:
    """One user of a file; `off`: why they are not to get in, in a word, if they are not."""

    user: pb.User
    off: str = ""


@dataclass
class Supply:
    """Takes entries one by one. `inbounds` are for users of whom the file names none."""

    inbounds: Sequence[str] = ()
    users: dict[str, pb.User] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    # Each looks its place up only when it is asked: in a long text that takes a while.
    _places: dict[str, Callable[[], str]] = field(default_factory=dict)
    _faults: list[str] = field(default_factory=list)

    def take(self, place: Callable[[], str], make: Callable[[], Entry]) -> None:
        """Take the user who stands there; what is wrong with them is told by `finish`."""
        try:
            self._take(place, make())
        except ValueError as error:
            self._faults.append(f"{place()}: {error}" if len(self._faults) < LISTED else "")

    def finish(self) -> Supply:
        """Raises `ValueError` with all that was wrong, a fault a line."""
        if self._faults:
            more = len(self._faults) - LISTED
            raise ValueError("\n".join(self._faults[:LISTED] + ([f"and {more} more faults"] if more > 0 else [])))
        return self

    def _take(self, place: Callable[[], str], entry: Entry) -> None:
        user = entry.user
        if not user.email:
            raise ValueError("the user has no name")
        key = key_of(user.email)
        if key in self._places:
            raise ValueError(f"{user.email} is in {self._places[key]()} already" if len(self._faults) < LISTED else "")
        self._places[key] = place
        if entry.off:
            self.left_out[entry.off] += 1
            return
        if not user.inbounds:
            user.inbounds.extend(self.inbounds)
        if not user.inbounds:
            raise ValueError(f"{user.email} has no inbounds: write them there, or say --inbound for those without")
        self.users[key] = user
