"""Who may call: the one API key, as `Authorization: Bearer` or as `x-api-key`, and which dialect the caller speaks."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Iterable
from enum import Enum

from node.errors import Unauthenticated

_BEARER = "bearer "


class Dialect(Enum):
    """What a caller expects beside the messages: the document's forms, or those of deployed clients.

    Deployed clients send `x-api-key` and parse plain-text errors and bare log lines.
    """

    DOCUMENT = "document"
    DEPLOYED = "deployed"


def dialect(x_api_key: Iterable[str]) -> Dialect:
    """A request that carries `x-api-key`, right or wrong, speaks the deployed dialect."""
    return Dialect.DEPLOYED if any(True for _ in x_api_key) else Dialect.DOCUMENT


class Authenticator:
    """Compares keys in constant time. A key that is a UUID is compared as one, so its spelling does not matter."""

    def __init__(self, key: str) -> None:
        self._expected = _digest(key)

    def check(self, authorization: Iterable[str], x_api_key: Iterable[str]) -> Dialect:
        """The caller's dialect. Every credential that is given must match; raises `Unauthenticated`."""
        bearer, keys = list(authorization), list(x_api_key)
        presented = [_token(value) for value in bearer] + keys
        matches = [hmac.compare_digest(_digest(key), self._expected) for key in presented]
        if not matches or not all(matches):
            raise Unauthenticated
        return dialect(keys)


def _token(value: str) -> str:
    scheme, token = value[: len(_BEARER)], value[len(_BEARER) :]
    return token.strip() if scheme.lower() == _BEARER else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(_canonical(key)).digest()


def _canonical(key: str) -> bytes:
    try:
        return uuid.UUID(key).bytes
    except ValueError:
        return key.encode("utf-8", "surrogateescape")
