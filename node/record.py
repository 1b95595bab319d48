"""What is said of the backend, as the changes that outlive the node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from node.database import Changes
from node.users import Roster, changed_users, key_of
from protos.service_pb2 import User


class Record(Protocol):
    """What outlives the node: see `node.store`."""

    def accept(self, request: bytes) -> None:
        """This backend runs."""

    def forget(self) -> None:
        """None does."""

    def users(self, changed: Mapping[str, bytes | None], clean: bool = False) -> None:
        """These users changed; with `clean` there are no others."""

    async def flush(self) -> None:
        """Wait until it is recorded, as far as that is possible."""


class Recorder:
    """Knows whether the record has a backend and its users, and tells it what changes of them."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._has_backend = False

    def backend(self, request: bytes, before: Roster, after: Roster) -> None:
        """A backend runs, with these users; `before` are those that the record has, if it has a backend."""
        self._record.accept(request)
        if self._has_backend:
            self.users(before, after)
        else:
            self._record.users(after.users, clean=True)
        self._has_backend = True

    def users(self, before: Roster, after: Roster) -> None:
        """A whole set. Where credentials collide its order counts, and all of it is written."""
        if self._has_backend and after is not before:
            clean = after.contested
            self._record.users(after.users if clean else changed_users(before.users, after.users), clean)

    @contextmanager
    def following(self, roster: Roster, users: Iterable[User]) -> Iterator[None]:
        """Some of these users change in the roster inside the block."""
        recorded = roster.users if self._has_backend else {}
        before = {key: recorded.get(key) for key in (key_of(user.email) for user in users)}
        try:
            yield
        finally:
            after = {key: recorded.get(key) for key in before}
            self._record.users({key: packed for key, packed in after.items() if packed is not before[key]})

    def forget(self) -> None:
        """Nothing comes back after the node's end."""
        self._has_backend = False
        self._record.forget()

    def everything(self, request: bytes, roster: Roster) -> Changes:
        """All that there is, for a record that has nothing of it."""
        return Changes(request=request, users=dict(roster.users)) if self._has_backend else Changes()

    async def kept(self) -> None:
        """Wait until what was said outlives the node: an answer is a promise."""
        await self._record.flush()
