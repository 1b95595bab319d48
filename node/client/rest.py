"""The client's calls over REST, by treq. Connections are kept for later calls; a log stream has one of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from cryptography.x509 import load_pem_x509_certificates
from google.protobuf.message import Message
from google.protobuf.proto import serialize_length_prefixed
from OpenSSL import SSL
from OpenSSL.crypto import X509, X509StoreFlags
from OpenSSL.SSL import Connection
from treq.client import HTTPClient
from twisted.internet import error
from twisted.internet.defer import CancelledError
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator, IReactorTime, IStreamClientEndpoint
from twisted.internet.ssl import Certificate, optionsForClientTLS, platformTrust, trustRootFromCertificates
from twisted.web.client import (  # type: ignore[attr-defined]
    URI,
    Agent,
    HTTPConnectionPool,
    RequestGenerationFailed,
    RequestNotSent,
    RequestTransmissionFailed,
    ResponseFailed,
)
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory, IResponse
from zope.interface import implementer

from node.api.auth import Dialect
from node.api.framing import single
from node.api.methods import Kind, Method
from node.base.errors import UsersRefused
from node.client.body import StreamBody, placed_lines, plain_lines, split_events, whole
from node.client.failures import Unreachable, of_http
from node.client.target import Target
from node.client.transport import LAST, Inbox, Line
from protos.service_pb2 import Event

MEDIA_TYPE = "application/x-protobuf"
# Seconds for which an idle connection is kept; the node closes one after 120.
IDLE = 30
_OK = 200
_NO_HEADERS: Mapping[str, str] = {}
_BROKEN = (
    error.ConnectError,
    error.ConnectionClosed,
    error.ConnectingCancelledError,
    error.DNSLookupError,
    RequestGenerationFailed,
    RequestNotSent,
    RequestTransmissionFailed,
    ResponseFailed,
    SSL.Error,
)


class RestTransport:
    """See `Transport`. A feed of users is one request for each; all are sent, then one error lists the refused ones."""

    def __init__(self, reactor: IReactorTime, target: Target) -> None:
        self._reactor = reactor
        self._host = target.address
        self._dialect = target.dialect
        self._credentials = target.credentials()
        self._pool = HTTPConnectionPool(reactor)
        self._pool.cachedConnectionTimeout = IDLE
        name = target.certificate_name or target.name
        endpoints = TlsEndpointFactory(reactor, target.name, target.port, name, target.certificates())
        self._http = HTTPClient(Agent.usingEndpointFactory(reactor, endpoints, pool=self._pool))

    async def call(self, method: Method, messages: Sequence[Message]) -> bytes:
        if method.kind is Kind.FEED and method.cut is single:
            return await self._one_by_one(method, messages)
        if method.kind is Kind.FEED:
            return await self._ask(method, _delimited(messages))
        (message,) = messages
        return await self._ask(method, message.SerializeToString())

    async def lines(self, method: Method, last: str) -> Inbox[Line]:
        response = await self._opened(method, b"", {LAST: last} if last else {})
        placed = self._dialect is Dialect.DOCUMENT
        return StreamBody(self._reactor, response, placed_lines if placed else plain_lines, beats=placed).inbox

    async def events(self, method: Method, request: Message) -> Inbox[Event]:
        response = await self._opened(method, request.SerializeToString())
        return StreamBody(self._reactor, response, split_events).inbox

    async def close(self) -> None:
        await self._pool.closeCachedConnections()

    async def _one_by_one(self, method: Method, messages: Sequence[Message]) -> bytes:
        refused: list[str] = []
        for message in messages:
            try:
                await self._ask(method, message.SerializeToString())
            except UsersRefused as fault:
                refused.append(fault.text.removeprefix(UsersRefused([]).text))
        if refused:
            raise UsersRefused.of_text(UsersRefused([]).text + "; ".join(refused))
        return b""

    async def _ask(self, method: Method, body: bytes) -> bytes:
        return await _whole(await self._opened(method, body))

    async def _opened(self, method: Method, body: bytes, more: Mapping[str, str] = _NO_HEADERS) -> IResponse:
        """Return the response with status 200, before its body is read. Raises the error of any other status."""
        fields = {**self._credentials, **more, "host": self._host}
        headers = Headers({name: [value] for name, value in fields.items()})
        if body:
            headers.setRawHeaders("Content-Type", [MEDIA_TYPE])
        try:
            response = await self._http.request(
                method.verbs[0],
                # Not the real host: treq does not accept IPv6 addresses.
                "https://node" + method.path,
                headers=headers,
                data=body or None,
                allow_redirects=False,
                unbuffered=True,
            )
        except _BROKEN as fault:
            raise _unanswered(fault) from fault
        except ValueError as fault:  # from Twisted and idna, before the name is resolved
            raise Unreachable(f"{self._host!r} is not a valid address: {fault}") from fault
        if response.code != _OK:
            raise of_http(method, response.code, await _whole(response), self._dialect)
        return response


def _delimited(messages: Sequence[Message]) -> bytes:
    body = BytesIO()
    for message in messages:
        serialize_length_prefixed(message, body)
    return body.getvalue()


async def _whole(response: IResponse) -> bytes:
    try:
        return await whole(response)
    except _BROKEN as fault:
        raise _unanswered(fault) from fault


def _unanswered(fault: Exception) -> Exception:
    """Return the error of a call without an answer: cancelled by the caller, no connection, or a broken one."""
    reasons = [failure.value for failure in getattr(fault, "reasons", ())] or [fault]
    if any(isinstance(reason, CancelledError | error.ConnectingCancelledError) for reason in reasons):
        return CancelledError()
    return Unreachable("no answer: " + "; ".join(f"{type(reason).__name__}: {reason}" for reason in reasons))


@implementer(IAgentEndpointFactory)
class TlsEndpointFactory:
    """Connects to this host, whatever the URL, and checks `name`. Without `pem` it trusts the machine's authorities."""

    def __init__(self, reactor: IReactorTime, host: str, port: int, name: str, pem: bytes | None) -> None:
        self._reactor = reactor
        self._name = name
        self._address = host, port
        found = [] if pem is None else load_pem_x509_certificates(pem)
        pinned = [Certificate(X509.from_cryptography(certificate)) for certificate in found]
        self._root = trustRootFromCertificates(pinned) if pinned else platformTrust()

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        host, port = self._address
        trusting = _Pinning(optionsForClientTLS(self._name, trustRoot=self._root))
        return wrapClientTLS(trusting, HostnameEndpoint(self._reactor, host, port))


@implementer(IOpenSSLClientConnectionCreator)
class _Pinning:
    """Trusts a pinned certificate also if another one has signed it, as gRPC's library does."""

    def __init__(self, creator: Any) -> None:
        self._creator = creator

    def clientConnectionForTLS(self, protocol: Any) -> Connection:
        connection: Connection = self._creator.clientConnectionForTLS(protocol)
        store = connection.get_context().get_cert_store()
        assert store is not None
        store.set_flags(X509StoreFlags.PARTIAL_CHAIN)
        return connection
