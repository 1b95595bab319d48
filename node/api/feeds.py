"""Calls with a stream of requests: single users as they change, and a set of users in chunks."""

from __future__ import annotations

from twisted.internet.defer import Deferred, DeferredSemaphore, ensureDeferred

from node.api.methods import MAX_BODY, MAX_USERS
from node.backend.members import Members, raise_refused
from node.base.errors import Internal, InvalidRequest, NodeError, TooLarge, shown
from node.base.logs import Logger
from node.base.waiting import outcomes
from node.contract.accounts import Refusal, key_of
from protos.service_pb2 import Empty, User, UsersChunk

# Users of one stream that may be on their way to the core; at that number the stream is not read further.
IN_FLIGHT = 1000
# Users of one stream whose failures are remembered for its reply, and characters of their names: it may be open for
# weeks. The log has all of them.
REMEMBERED = 1000
LONGEST_NAME = 100


def require_few(users: int) -> None:
    """Raise `InvalidRequest` for more users than one call may have."""
    if users > MAX_USERS:
        raise InvalidRequest(f"more than {MAX_USERS} users in one call")


class UserFeed:
    """Applies each user as they arrive. Failures are reported in the reply: one user must not end a stream."""

    log = Logger()

    def __init__(self, members: Members) -> None:
        self._members = members
        self._room = DeferredSemaphore(IN_FLIGHT)
        self._under_way: set[Deferred[None]] = set()
        # By user: the core's refusals, or the error with which the user was not applied.
        self._wrong: dict[str, list[Refusal] | NodeError] = {}

    async def feed(self, user: User) -> None:
        await self._room.acquire()
        work = ensureDeferred(self._one(user))
        if not work.called:
            self._under_way.add(work)
            work.addBoth(lambda _: self._under_way.discard(work))

    async def finish(self) -> Empty:
        await outcomes([*self._under_way])
        await self._members.recorded()
        errors = [wrong for wrong in self._wrong.values() if isinstance(wrong, NodeError)]
        if errors:
            raise errors[-1]
        raise_refused([refusal for wrong in self._wrong.values() if isinstance(wrong, list) for refusal in wrong])
        return Empty()

    async def _one(self, user: User) -> None:
        try:
            self._note(user.email, await self._applied(user))
        except NodeError as error:
            self._note(user.email, error)
            self.log.warn("user {user} was not applied: {of_user}", user=user.email, of_user=error.text)
        except Exception as error:  # noqa: BLE001 - logged, and reported in the reply
            self.log.failure("user {user} was not applied", user=user.email)
            self._note(user.email, Internal(f"internal error for user {shown(user.email)}: {type(error).__name__}"))
        finally:
            self._room.release()

    async def _applied(self, user: User) -> list[Refusal]:
        """Apply one user. Returns the refusals."""
        refused = await self._members.apply(user)
        for email, reason in refused:
            self.log.warn("user {user} was refused: {of_user}", user=email, of_user=reason)
        return [Refusal(email[:LONGEST_NAME], reason) for email, reason in refused]

    def _note(self, email: str, wrong: list[Refusal] | NodeError) -> None:
        """Remember the last outcome of a user: a later success replaces an earlier failure."""
        key = key_of(email[:LONGEST_NAME])
        self._wrong.pop(key, None)
        if wrong:
            self._wrong[key] = wrong
        if len(self._wrong) > REMEMBERED:
            del self._wrong[next(iter(self._wrong))]


class ChunkFeed:
    """Applies a partial update in chunks 0, 1, …, at once when the last one is there. Chunks must come in order."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._users: list[User] = []
        self._size = 0
        self._next = 0
        self._complete = False

    async def feed(self, chunk: UsersChunk) -> None:
        if self._complete:
            raise InvalidRequest("a chunk arrived after the one that is marked as last")
        if chunk.index != self._next:
            raise InvalidRequest(f"expected chunk {self._next}, got chunk {chunk.index}")
        self._size += chunk.ByteSize()
        if self._size > MAX_BODY:
            raise TooLarge(f"the chunks together are larger than {MAX_BODY} bytes")
        require_few(len(self._users) + len(chunk.users))
        self._users += chunk.users
        self._next += 1
        self._complete = chunk.last

    async def finish(self) -> Empty:
        if not self._complete:
            raise InvalidRequest("no chunk is marked as last: the stream is incomplete, and no user was changed")
        await self._members.update(self._users)
        return Empty()
