"""Calls whose requests are a stream: single users as they change, and a set of users cut into chunks."""

from __future__ import annotations

from twisted.internet.defer import Deferred, DeferredSemaphore, ensureDeferred, gatherResults

from node.api.methods import MAX_BODY, MAX_USERS
from node.backend.members import Members, raise_refused
from node.contract.accounts import Refusal, key_of
from node.errors import Internal, InvalidRequest, NodeError, TooLarge, shown
from node.logs import Logger
from protos.service_pb2 import Empty, User, UsersChunk

# Users of one stream that may be on their way to the core; then the stream is not read further.
IN_FLIGHT = 1000
# Users of one stream who were refused and are named at its end, and of how long a name: it may be open for weeks. The
# log has all of them.
REMEMBERED = 1000
LONGEST_NAME = 100


def require_few(users: int) -> None:
    """Raises `InvalidRequest` for more users than one call may have."""
    if users > MAX_USERS:
        raise InvalidRequest(f"there are more than {MAX_USERS} users in one call")


class UserFeed:
    """Each user is applied as he arrives. What goes wrong is told at the end: one user must not end a stream."""

    log = Logger()

    def __init__(self, members: Members) -> None:
        self._members = members
        self._room = DeferredSemaphore(IN_FLIGHT)
        self._under_way: set[Deferred[None]] = set()
        self._refused: dict[str, list[Refusal]] = {}
        self._fault: NodeError | None = None

    async def feed(self, user: User) -> None:
        await self._room.acquire()
        work = ensureDeferred(self._one(user))
        if not work.called:
            self._under_way.add(work)
            work.addBoth(lambda _: self._under_way.discard(work))

    async def finish(self) -> Empty:
        await gatherResults([*self._under_way])
        await self._members.recorded()
        if self._fault is not None:
            raise self._fault
        raise_refused([refusal for refused in self._refused.values() for refusal in refused])
        return Empty()

    async def _one(self, user: User) -> None:
        try:
            touched, refused = await self._members.put(user)
            refused = refused + await self._members.settle(touched)
            self._note(user.email, refused)
        except NodeError as fault:
            self._fault = fault
            self.log.warn("user {email} was not applied: {reason}", email=user.email, reason=fault.text)
        except Exception as fault:  # noqa: BLE001 - logged, and told at the end
            self.log.failure("user {email} was not applied", email=user.email)
            self._fault = Internal(f"internal error for user {shown(user.email)}: {type(fault).__name__}")
        finally:
            self._room.release()

    def _note(self, email: str, refused: list[Refusal]) -> None:
        """Remember the newest word on a user: a later message that works mends an earlier one."""
        key = key_of(email[:LONGEST_NAME])
        self._refused.pop(key, None)
        if refused:
            self._refused[key] = [Refusal(name[:LONGEST_NAME], reason) for name, reason in refused]
        if len(self._refused) > REMEMBERED:
            del self._refused[next(iter(self._refused))]
        for refusal in refused:
            self.log.warn("user {email} was refused: {reason}", email=refusal.email, reason=refusal.reason)


class ChunkFeed:
    """A partial update in chunks 0, 1, … last. Nothing is applied before all of it is here and in order."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._users: list[User] = []
        self._size = 0
        self._next = 0
        self._complete = False

    async def feed(self, chunk: UsersChunk) -> None:
        if self._complete:
            raise InvalidRequest("there is a chunk after the last")
        if chunk.index != self._next:
            raise InvalidRequest(f"chunk {self._next} was expected, {chunk.index} came")
        self._size += chunk.ByteSize()
        if self._size > MAX_BODY:
            raise TooLarge(f"the chunks are over {MAX_BODY} bytes together")
        require_few(len(self._users) + len(chunk.users))
        self._users += chunk.users
        self._next += 1
        self._complete = chunk.last

    async def finish(self) -> Empty:
        if not self._complete:
            raise InvalidRequest("the last chunk is missing")
        await self._members.update(self._users)
        return Empty()
