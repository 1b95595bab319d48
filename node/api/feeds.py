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
# Users of one stream whose last message went wrong and who are told of at its end, and of how long a name: it may be
# open for weeks. The log has all of them.
REMEMBERED = 1000
LONGEST_NAME = 100


def require_few(users: int) -> None:
    """Raises `InvalidRequest` for more users than one call may have."""
    if users > MAX_USERS:
        raise InvalidRequest(f"there are more than {MAX_USERS} users in one call")


class UserFeed:
    """Each user is applied as they arrive. What goes wrong is told at the end: one user must not end a stream."""

    log = Logger()

    def __init__(self, members: Members) -> None:
        self._members = members
        self._room = DeferredSemaphore(IN_FLIGHT)
        self._under_way: set[Deferred[None]] = set()
        # By user: what the core refused of them, or why they were not applied.
        self._wrong: dict[str, list[Refusal] | NodeError] = {}

    async def feed(self, user: User) -> None:
        await self._room.acquire()
        work = ensureDeferred(self._one(user))
        if not work.called:
            self._under_way.add(work)
            work.addBoth(lambda _: self._under_way.discard(work))

    async def finish(self) -> Empty:
        await gatherResults([*self._under_way])
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
        except Exception as error:  # noqa: BLE001 - logged, and told at the end
            self.log.failure("user {user} was not applied", user=user.email)
            self._note(user.email, Internal(f"internal error for user {shown(user.email)}: {type(error).__name__}"))
        finally:
            self._room.release()

    async def _applied(self, user: User) -> list[Refusal]:
        """Apply what a message says of a user. What was refused of it."""
        touched, refused = await self._members.put(user)
        refused = refused + await self._members.settle(touched)
        for email, reason in refused:
            self.log.warn("user {user} was refused: {of_user}", user=email, of_user=reason)
        return [Refusal(email[:LONGEST_NAME], reason) for email, reason in refused]

    def _note(self, email: str, wrong: list[Refusal] | NodeError) -> None:
        """Remember the newest word on a user: a later message that works mends an earlier one."""
        key = key_of(email[:LONGEST_NAME])
        self._wrong.pop(key, None)
        if wrong:
            self._wrong[key] = wrong
        if len(self._wrong) > REMEMBERED:
            del self._wrong[next(iter(self._wrong))]


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
