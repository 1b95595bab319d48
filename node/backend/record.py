"""Saves the desired state: turns changes of the backend and its users into writes to the state file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from node.backend.roster import Roster, changed_users
from node.contract.accounts import key_of
from node.contract.saved import Changes, Saved
from node.state.store import Store
from protos.service_pb2 import User

# From this many users on, they are written ahead while the core starts; fewer take no time.
STAGED = 1000


class Recorder:
    """Knows which backend and users the record has, and writes the differences.

    A backend from an earlier node stays in the record until it is resumed, replaced or forgotten. The running backend
    stays there until it is forgotten: the end of the node does not change it.
    """

    def __init__(self, record: Store) -> None:
        self._record = record
        self._left: tuple[bytes, ...] = ()
        # The same by key, cached at the first use.
        self._keyed: dict[str, bytes] | None = None
        self._request = self._routing = b""
        # The roster of the backend that this node ran, as the record has it; None before the first.
        self._roster: Roster | None = None
        self.untouched = True

    def loaded(self, saved: Saved) -> None:
        """Note what the record has from an earlier node."""
        self._left, self._request, self._routing = saved.users, saved.request, saved.routing
        self._keyed = None

    async def left(self, in_pool: Callable[..., Awaitable[dict[str, bytes]]]) -> Mapping[str, bytes]:
        """The users, by key, of an earlier node's backend that was not resumed yet; parsed in the pool."""
        while self._keyed is None:
            left = self._left
            keyed = await in_pool(_by_key, left)
            if left is self._left:  # else they were replaced meanwhile
                self._keyed = keyed
        return self._keyed

    def stage(self, roster: Roster) -> None:
        """Write ahead the users of a backend that is being tried: `backend` or `unstage` follows."""
        if self._roster is None and len(roster.users) >= STAGED and not self._has(roster):
            self._record.stage(roster.users)

    def _has(self, roster: Roster) -> bool:
        """Whether the record has exactly these users from an earlier node."""
        return bool(self._left) and [*self._left] == [*roster.users.values()]

    def unstage(self) -> None:
        """Drop the users written ahead: the backend does not run."""
        self._record.stage({})

    def backend(self, request: bytes, routing: bytes, before: Roster, after: Roster) -> None:
        """Save a backend that runs, with its users; `before` is the roster in the record, if this node wrote one."""
        self._record.accept(request, routing)
        if self._roster is not None:
            self.users(before, after)
        elif not self._has(after):
            self._record.users(after.users, clean=True)
        self._replace(request, routing, after)

    def routing(self, packed: bytes) -> None:
        """Save changed routing of the backend."""
        self._routing = packed
        self._record.routing(packed)

    def users(self, before: Roster, after: Roster) -> None:
        """Save a whole new roster. If credentials collide its order matters, and all of it is written."""
        if self._roster is not None and after is not before:
            clean = after.contested
            self._record.users(after.users if clean else changed_users(before.users, after.users), clean)
            self._roster = after

    @contextmanager
    def following(self, roster: Roster, users: Iterable[User]) -> Iterator[None]:
        """Save the changes that the block makes to these users of the roster."""
        recorded = {} if self._roster is None else roster.users
        before = {key: recorded.get(key) for key in (key_of(user.email) for user in users)}
        try:
            yield
        finally:
            after = {key: recorded.get(key) for key in before}
            self._record.users({key: packed for key, packed in after.items() if packed is not before[key]})

    def forget(self) -> None:
        """Delete the saved backend: the next node resumes nothing."""
        self._record.forget()
        self._replace(b"", b"", None)

    def save(self, changes: Changes) -> None:
        """Add all that the record should have of the backend, for an empty one."""
        changes.request, changes.routing = self._request, self._routing
        changes.users = {**(_by_key(self._left) if self._roster is None else self._roster.users)}

    def _replace(self, request: bytes, routing: bytes, roster: Roster | None) -> None:
        self._left, self._keyed, self._request, self._routing = (), None, request, routing
        self._roster, self.untouched = roster, False

    async def kept(self) -> None:
        """Wait until all changes are on disk: a reply to a controller promises that."""
        await self._record.flush()


def _by_key(users: Iterable[bytes]) -> dict[str, bytes]:
    return {key_of(User.FromString(packed).email): packed for packed in users}
