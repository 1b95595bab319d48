"""Collects the users of a file while it is read, those left out, and the faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from node.contract.accounts import key_of
from protos import service_pb2 as pb

M = TypeVar("M", bound=Message)

# Faults in one error.
LISTED = 20


@dataclass(frozen=True)
class Entry:
    """One user of a file; `off`: in a word, why they are left out, if they are."""

    user: pb.User
    off: str = ""


@dataclass
class Supply:
    """Takes entries one by one. `inbounds` are for users without inbounds in the file."""

    inbounds: Sequence[str] = ()
    users: dict[str, pb.User] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    # Functions, because searching a long text for a place is slow.
    _places: dict[str, Callable[[], str]] = field(default_factory=dict)
    _faults: list[str] = field(default_factory=list)

    def take(self, place: Callable[[], str], make: Callable[[], Entry]) -> None:
        """Add the user made by `make`. `finish` reports their faults."""
        try:
            self._take(place, make())
        except ValueError as error:
            self._faults.append(f"{place()}: {error}" if len(self._faults) < LISTED else "")

    def finish(self) -> Supply:
        """Check that there were no faults. Raises `ValueError` with one fault a line."""
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
            raise ValueError(f"{user.email} is already in {self._places[key]()}" if len(self._faults) < LISTED else "")
        self._places[key] = place
        if entry.off:
            self.left_out[entry.off] += 1
            return
        if not user.inbounds:
            user.inbounds.extend(self.inbounds)
        if not user.inbounds:
            raise ValueError(f"{user.email} has no inbounds: add them to the file, or give --inbound")
        self.users[key] = user


def message_of(fields: dict[str, Any], empty: M) -> M:
    """Parse fields of a JSON document into a message. Raises `ValueError`."""
    try:
        return ParseDict(fields, empty)
    except (ParseError, TypeError) as error:
        raise ValueError(str(error)) from error
