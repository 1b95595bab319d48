"""Users of Shadowsocks who come and go while the core runs, through its ssm-api. In the reactor.

What is said of it here was tried on 1.14.1 and 1.14.4, or read in `service/ssmapi` of the former.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from urllib.parse import quote

from twisted.internet import defer, error
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure
from twisted.web.client import (
    Agent,
    FileBodyProducer,
    HTTPConnectionPool,
    RequestTransmissionFailed,
    ResponseDone,
    ResponseFailed,
)

from drivers.channel import ApiFailed
from drivers.sing_box.config import Endpoint
from node.reactor import PooledReactor
from node.waiting import together

# Seconds that the core may take: with each change it builds the keys of all users anew.
DEADLINE = 10.0
_FAULTS = (error.ConnectError, error.ConnectionClosed, defer.TimeoutError, RequestTransmissionFailed, ResponseFailed)
# Go leaves these in a path as they are; with any others in it, or these quoted, the core does not find the name.
_PLAIN = "$&+,:;=@"
# The fields in the order of the core's structure: nobody who has 0 of both is looked at closer.
_ROW = re.compile(rb'"username":("(?:[^"\\]|\\.)*"),"downlinkBytes":(\d+),"uplinkBytes":(\d+)')


class LiveUsers:
    """The users of the inbounds `tags` of one run of the core, by their labels.

    A removed user stays in the core's list with a key that nobody has. So their counters do not vanish, and the list
    does not become shorter: a connection that is about to come in holds a place in it, and would end the core if that
    was not there any more (`protocol/shadowsocks/inbound_multi.go`).
    """

    def __init__(self, reactor: PooledReactor, endpoint: Endpoint, tags: Sequence[str]) -> None:
        self._reactor = reactor
        self._pool = HTTPConnectionPool(reactor)
        self._agent = Agent(reactor, connectTimeout=DEADLINE, pool=self._pool)
        # What removed users have instead of theirs.
        self.nobody = base64.b64encode(secrets.token_bytes(32)).decode()
        self._places = {
            tag: f"http://127.0.0.1:{endpoint.users_port}{endpoint.path(number)}/server/v1"
            for number, tag in enumerate(tags)
        }

    async def close(self) -> None:
        await self._pool.closeCachedConnections()

    async def let_in(self, tag: str, user: str, password: str) -> None:
        """Give a user, new or known, this credential. One that is refused leaves no trace. Raises `ApiFailed`."""
        code, text = await self._change(tag, user, password)
        if code == 404:
            entry = {"username": user, "uPSK": password}
            code, text = await self._ask(b"POST", f"{self._places[tag]}/users", entry)
            if code != 201:
                # The core has kept them, and would refuse all others from now on.
                await self._ask(b"DELETE", self._path(tag, user))
                raise ApiFailed(text.decode("utf-8", "replace"))
        elif code != 204:
            await self._change(tag, user, self.nobody)
            raise ApiFailed(text.decode("utf-8", "replace"))

    async def shut_out(self, tag: str, user: str) -> None:
        """Nobody has the credential of this user any more. Connected users stay. Raises `ApiFailed`."""
        code, text = await self._change(tag, user, self.nobody)
        if code not in (204, 404):
            raise ApiFailed(text.decode("utf-8", "replace"))

    async def counters(self) -> dict[str, tuple[int, int]]:
        """Bytes up and down of all who carried any, by label, since this run began. Raises `ApiFailed`."""
        total: dict[str, tuple[int, int]] = {}
        pool = self._reactor.getThreadPool()
        for place in self._places.values():
            reply = await self._get(f"{place}/stats")
            rows = await deferToThreadPool(self._reactor, pool, carried, reply)
            for user, (up, down) in rows.items():
                before = total.get(user, (0, 0))
                total[user] = before[0] + up, before[1] + down
        return total

    async def some_counters(self, users: Iterable[str]) -> dict[str, tuple[int, int]]:
        """The same of these alone, with those who carried nothing. Raises `ApiFailed`."""
        asked = list(users)
        found = await together(self._counted(user) for user in asked)
        return dict(zip(asked, found, strict=True))

    async def _counted(self, user: str) -> tuple[int, int]:
        rows = await together(self._row(_path(place, user)) for place in self._places.values())
        return sum(row[0] for row in rows), sum(row[1] for row in rows)

    async def _row(self, url: str) -> tuple[int, int]:
        """What a user carried up and down by one inbound, which may not have them."""
        code, reply = await self._ask(b"GET", url)
        if code == 404:
            return 0, 0
        if code != 200:
            raise ApiFailed(f"status {code}")
        row = json.loads(reply)
        return row["uplinkBytes"], row["downlinkBytes"]

    async def listed(self, tag: str) -> Mapping[str, str]:
        """The core's own list: passwords by label, without those whom nobody can be. Raises `ApiFailed`."""
        users = json.loads(await self._get(f"{self._places[tag]}/users"))["users"]
        return {user["username"]: user["uPSK"] for user in users if user["uPSK"] != self.nobody}

    def _path(self, tag: str, user: str) -> str:
        return _path(self._places[tag], user)

    async def _change(self, tag: str, user: str, password: str) -> tuple[int, bytes]:
        return await self._ask(b"PUT", self._path(tag, user), {"uPSK": password})

    async def _get(self, url: str) -> bytes:
        code, reply = await self._ask(b"GET", url)
        if code != 200:
            raise ApiFailed(f"status {code}")
        return reply

    async def _ask(self, method: bytes, url: str, body: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        producer = FileBodyProducer(BytesIO(json.dumps(body).encode())) if body is not None else None
        asked = self._agent.request(method, url.encode(), bodyProducer=producer)
        try:
            response = await asked.addTimeout(DEADLINE, self._reactor)
            reply = _Body()
            response.deliverBody(reply)
            return response.code, await reply.whole.addTimeout(DEADLINE, self._reactor)
        except _FAULTS as fault:
            raise ApiFailed(f"the core did not answer: {fault}") from fault


class _Body(Protocol):
    """Collects a reply. Twisted's own `readBody` warns of each one that was there at once."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.whole: defer.Deferred[bytes] = defer.Deferred()

    def dataReceived(self, data: bytes) -> None:
        self._parts.append(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.whole.called:
            return  # nobody waits any more
        if reason.check(ResponseDone):
            self.whole.callback(b"".join(self._parts))
        else:
            self.whole.errback(reason)


def _path(place: str, user: str) -> str:
    return f"{place}/users/{quote(user, safe=_PLAIN)}"


def carried(stats: bytes) -> dict[str, tuple[int, int]]:
    """Bytes up and down by label, of those who carried any. Pure."""
    rows = (match.groups() for match in _ROW.finditer(stats))
    return {json.loads(user): (int(up), int(down)) for user, down, up in rows if up != b"0" or down != b"0"}
