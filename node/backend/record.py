"""What is said of the backend, as the changes that outlive the node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from node.backend.roster import Roster, changed_users
from node.contract.accounts import key_of
from node.state.database import Changes, Saved
from protos.service_pb2 import User

# As many users are written while a core comes up; fewer take no time.
STAGED = 1000


class Record(Protocol):
    """What outlives the node: see `node.state.store`."""

    def accept(self, request: bytes, routing: bytes = b"") -> None:
        """This backend runs, with these changes of its routing."""

    def routing(self, packed: bytes) -> None:
        """These are the changes of its routing."""

    def forget(self) -> None:
        """None does."""

    def users(self, changed: Mapping[str, bytes | None], clean: bool = False) -> None:
        """These users changed; with `clean` there are no others."""

    def stage(self, users: Mapping[str, bytes]) -> None:
        """These may be said to be all soon; nobody if there are none."""

    async def flush(self) -> None:
        """Wait until it is recorded, as far as that is possible."""


class Recorder:
    """Knows which backend and users the record has, and tells it what changes of them.

    What an earlier node left stays in the record until it is resumed, another backend takes its place, or it is
    forgotten. What runs stays there until it is forgotten: the end of the node does not change it.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._left: tuple[bytes, ...] = ()
        # The same by key, once somebody has asked for it.
        self._keyed: dict[str, bytes] | None = None
        self._request = self._routing = b""
        # The users of what ran since this node began; the record has them, and follows them.
        self._roster: Roster | None = None
        self.untouched = True

    def loaded(self, saved: Saved) -> None:
        """The record has this from an earlier node."""
        self._left, self._request, self._routing = saved.users, saved.request, saved.routing
        self._keyed = None

    async def left(self, in_pool: Callable[..., Awaitable[dict[str, bytes]]]) -> Mapping[str, bytes]:
        """The users, by key, whom an earlier node left and who are not back yet. Of many they are read in the pool."""
        while self._keyed is None:
            left = self._left
            keyed = await in_pool(_by_key, left)
            if left is self._left:  # else something took their place meanwhile
                self._keyed = keyed
        return self._keyed

    def stage(self, roster: Roster) -> None:
        """A backend is tried that has these users: `backend` or `unstage` follows."""
        if self._roster is None and len(roster.users) >= STAGED:
            self._record.stage(roster.users)

    def unstage(self) -> None:
        """It does not run."""
        self._record.stage({})

    def backend(self, request: bytes, routing: bytes, before: Roster, after: Roster) -> None:
        """A backend runs, with these users; `before` are those that the record has, if this node gave it a backend."""
        self._record.accept(request, routing)
        if self._roster is None:
            self._record.users(after.users, clean=True)
        else:
            self.users(before, after)
        self._replace(request, routing, after)

    def routing(self, packed: bytes) -> None:
        """The routing of the backend changed."""
        self._routing = packed
        self._record.routing(packed)

    def users(self, before: Roster, after: Roster) -> None:
        """A whole set. Where credentials collide its order counts, and all of it is written."""
        if self._roster is not None and after is not before:
            clean = after.contested
            self._record.users(after.users if clean else changed_users(before.users, after.users), clean)
            self._roster = after

    @contextmanager
    def following(self, roster: Roster, users: Iterable[User]) -> Iterator[None]:
        """Some of these users change in the roster inside the block."""
        recorded = {} if self._roster is None else roster.users
        before = {key: recorded.get(key) for key in (key_of(user.email) for user in users)}
        try:
            yield
        finally:
            after = {key: recorded.get(key) for key in before}
            self._record.users({key: packed for key, packed in after.items() if packed is not before[key]})

    def forget(self) -> None:
        """Nothing comes back after the node's end."""
        self._record.forget()
        self._replace(b"", b"", None)

    def everything(self) -> Changes:
        """All that the record is to have of the backend, for one that has nothing of it."""
        if self._roster is not None:
            return Changes(request=self._request, routing=self._routing, users=dict(self._roster.users))
        return Changes(request=self._request, routing=self._routing, users={**_by_key(self._left)})

    def _replace(self, request: bytes, routing: bytes, roster: Roster | None) -> None:
        self._left, self._keyed, self._request, self._routing = (), None, request, routing
        self._roster, self.untouched = roster, False

    async def kept(self) -> None:
        """Wait until what was said outlives the node: an answer is a promise."""
        await self._record.flush()


def _by_key(users: Iterable[bytes]) -> dict[str, bytes]:
    return {key_of(User.FromString(packed).email): packed for packed in users}
