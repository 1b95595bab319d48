"""Client of sing-box's ssm-api: add, change and count Shadowsocks users while the core runs. In the reactor.

The behaviour described here was tried on sing-box 1.14.1 and 1.14.4, or read in `service/ssmapi` of 1.14.1.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any
from urllib.parse import quote

from twisted.internet import defer, error
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import (
    URI,
    Agent,
    FileBodyProducer,
    HTTPConnectionPool,
    RequestTransmissionFailed,
    ResponseDone,
    ResponseFailed,
)
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from drivers.process.channel import ApiFailed
from drivers.sing_box.accounts import unlabelled
from drivers.sing_box.config import ApiAddress
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.base.waiting import together

# Seconds that the core may take: with each change it rebuilds the keys of all users.
DEADLINE = 10.0
_FAULTS = (error.ConnectError, error.ConnectionClosed, defer.TimeoutError, RequestTransmissionFailed, ResponseFailed)
# The characters that Go leaves unquoted in a path; quoted differently, the core does not find the name.
_PLAIN = "$&+,:;=@"
# The fields in the order of the core's structure.
_ROW = re.compile(rb'"username":("(?:[^"\\]|\\.)*"),"downlinkBytes":(\d+),"uplinkBytes":(\d+)')


class LiveUsers:
    """The live users of one core process in the inbounds `tags`, by label.

    A removed user stays in the core's list, with a random key. So their counters do not vanish, and a crash of the core
    is avoided, which 1.14.4 still has.
    """

    def __init__(self, reactor: PooledReactor, endpoint: ApiAddress, tags: Sequence[str]) -> None:
        self._reactor = reactor
        self._pool = HTTPConnectionPool(reactor)
        self._agent = Agent.usingEndpointFactory(reactor, _Places(reactor), self._pool)
        # The key that removed users have.
        self.random_key = base64.b64encode(secrets.token_bytes(32)).decode()
        self._places = {
            tag: f"http://127.0.0.1:{endpoint.users_port}{endpoint.path(number)}/server/v1"
            for number, tag in enumerate(tags)
        }
        # The last known bytes up and down by label; None after a hand-over, until all are read.
        self._last_known: dict[str, tuple[int, int]] | None = {}

    def go_on(self, random_key: str) -> None:
        """Take over from a previous node process, which gave removed users this key."""
        self.random_key, self._last_known = random_key, None

    @property
    def last_known(self) -> Mapping[str, tuple[int, int]]:
        """The last known counters, for a core that has ended. Raises `ApiFailed` if this process never read them."""
        if self._last_known is None:
            raise ApiFailed("the core exited before the node could read the bytes of its users")
        return self._last_known

    async def close(self) -> None:
        await self._pool.closeCachedConnections()

    async def let_in(self, tag: str, user: str, password: str, seconds: float = DEADLINE) -> None:
        """Give a new or known user this credential; a refused one leaves no trace. Raises `ApiFailed`."""
        code, text = await self._change(tag, user, password, seconds)
        if code == 204:
            return
        if code == 404:
            entry = {"username": user, "uPSK": password}
            code, text = await self._ask(b"POST", f"{self._places[tag]}/users", entry, seconds)
            if code == 201:
                return
            # The core has kept the refused user, and would refuse all others from now on.
            await self._ask(b"DELETE", _path(self._places[tag], user))
        else:
            await self._change(tag, user, self.random_key)
        raise _refused(text)

    async def shut_out(self, tag: str, user: str, seconds: float = DEADLINE) -> None:
        """Replace the user's key by the random one; connections stay open. Raises `ApiFailed`."""
        code, text = await self._change(tag, user, self.random_key, seconds)
        if code not in (204, 404):
            raise _refused(text)

    async def counters(self) -> dict[str, tuple[int, int]]:
        """Return bytes up and down by label since the core started, of users with any. Raises `ApiFailed`."""
        total: dict[str, tuple[int, int]] = {}
        for place in self._places.values():
            reply = await self._get(f"{place}/stats")
            rows = await in_pool(self._reactor, carried, reply)
            for user, (up, down) in rows.items():
                before = total.get(user, (0, 0))
                total[user] = before[0] + up, before[1] + down
        self._last_known = dict(total)
        return total

    async def some_counters(self, users: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return bytes up and down of these users, also of those without any. Raises `ApiFailed`."""
        asked = list(users)
        found = await together(self._counted(user) for user in asked)
        counted = dict(zip(asked, found, strict=True))
        if self._last_known is not None:
            self._last_known.update(counted)
        return counted

    async def _counted(self, user: str) -> tuple[int, int]:
        rows = await together(self._row(_path(place, user)) for place in self._places.values())
        return sum(row[0] for row in rows), sum(row[1] for row in rows)

    async def _row(self, url: str) -> tuple[int, int]:
        """Return a user's bytes up and down in one inbound; 0 if it does not have the user."""
        row = json.loads(await self._get(url, missing=b'{"uplinkBytes": 0, "downlinkBytes": 0}'))
        return row["uplinkBytes"], row["downlinkBytes"]

    async def listed(self, tag: str) -> Mapping[str, str]:
        """Return the core's own list of users: passwords by label, without removed users. Raises `ApiFailed`."""
        users = json.loads(await self._get(f"{self._places[tag]}/users"))["users"]
        return {user["username"]: user["uPSK"] for user in users if user["uPSK"] != self.random_key}

    async def _change(self, tag: str, user: str, password: str, seconds: float = DEADLINE) -> tuple[int, bytes]:
        return await self._ask(b"PUT", _path(self._places[tag], user), {"uPSK": password}, seconds)

    async def _get(self, url: str, missing: bytes = b"") -> bytes:
        """The reply; `missing`, if given, for what the core does not have. Raises `ApiFailed`."""
        code, reply = await self._ask(b"GET", url)
        if code == 404 and missing:
            return missing
        if code != 200:
            raise ApiFailed(f"ssm-api answered with HTTP status {code}")
        return reply

    async def _ask(
        self, method: bytes, url: str, body: Mapping[str, str] | None = None, seconds: float = DEADLINE
    ) -> tuple[int, bytes]:
        """Send a request; return the status and body. Raises `ApiFailed` without an answer in time."""
        if seconds <= 0:
            raise ApiFailed("no time was left for it: the core was slow with the changes before it")
        producer = FileBodyProducer(BytesIO(json.dumps(body).encode())) if body is not None else None
        asked = self._agent.request(method, url.encode(), bodyProducer=producer).addErrback(_given_up)
        try:
            response = await asked.addTimeout(seconds, self._reactor)
            reply = _Body()
            response.deliverBody(reply)
            return response.code, await reply.whole.addTimeout(seconds, self._reactor)
        except _FAULTS as fault:
            raise ApiFailed(f"the core's ssm-api did not answer: {fault}") from fault


def _refused(text: bytes) -> ApiFailed:
    """The core's reason, which may have its name for a user, for logs and replies."""
    return ApiFailed(unlabelled(text.decode("utf-8", "replace")))


def _given_up(failure: Failure) -> Failure:
    """Turn the failure of a cancelled request into `CancelledError`: Twisted reports the step that was cancelled."""
    reasons = getattr(failure.value, "reasons", ())
    if failure.check(error.ConnectingCancelledError) or any(reason.check(CancelledError) for reason in reasons):
        return Failure(CancelledError())
    return failure


@implementer(IAgentEndpointFactory)
class _Places:
    """Connect to 127.0.0.1, with factories that do not log their start and stop."""

    def __init__(self, reactor: PooledReactor) -> None:
        self._reactor = reactor

    def endpointForURI(self, uri: URI) -> _Quiet:
        return _Quiet(self._reactor, "127.0.0.1", uri.port, DEADLINE)


class _Quiet(TCP4ClientEndpoint):
    def connect(self, protocolFactory: Any) -> Deferred[Any]:  # noqa: N803 - Twisted's name
        protocolFactory.noisy = False
        return super().connect(protocolFactory)


class _Body(Protocol):
    """Collect the body of a reply. Twisted's own `readBody` warns of each body that is there at once."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.whole: defer.Deferred[bytes] = defer.Deferred()

    def dataReceived(self, data: bytes) -> None:
        self._parts.append(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.whole.called:
            return  # the request timed out
        if reason.check(ResponseDone):
            self.whole.callback(b"".join(self._parts))
        else:
            self.whole.errback(reason)


def _path(place: str, user: str) -> str:
    return f"{place}/users/{quote(user, safe=_PLAIN)}"


def carried(stats: bytes) -> dict[str, tuple[int, int]]:
    """Parse ssm-api's counters: bytes up and down by label, without users who carried nothing. Pure."""
    rows = (match.groups() for match in _ROW.finditer(stats))
    return {json.loads(user): (int(up), int(down)) for user, down, up in rows if up != b"0" or down != b"0"}
