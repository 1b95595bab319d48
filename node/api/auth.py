"""Who may call: those with a key, as `Authorization: Bearer` or as `x-api-key`; and which dialect each one speaks."""

from __future__ import annotations

import hmac
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from node.errors import Forbidden, Unauthenticated
from node.keyfile import Key, Scope, digest_of
from node.settings import DEFAULT_KEY

_BEARER = "bearer "
_BASIC = "basic "
# Whoever is let in without a key, to what is open to them.
NOBODY_KEY = Key("none", Scope.METRICS, b"")
# Whoever has shown a certificate, where that does instead of a key.
_CERTIFIED = Key("certificate", Scope.ALL, b"")


class Dialect(Enum):
    """What a caller expects beside the messages: the document's forms, or those of deployed clients.

    Deployed clients send `x-api-key` and parse plain-text errors and bare log lines.
    """

    DOCUMENT = "document"
    DEPLOYED = "deployed"


def dialect(x_api_key: Iterable[str]) -> Dialect:
    """A request that carries `x-api-key`, right or wrong, speaks the deployed dialect."""
    return Dialect.DEPLOYED if any(True for _ in x_api_key) else Dialect.DOCUMENT


@dataclass(frozen=True)
class Caller:
    """Who calls: by which key, how they speak, and from which address."""

    key: Key
    dialect: Dialect = Dialect.DOCUMENT
    address: str = ""

    @property
    def known(self) -> bool:
        """They have shown a key."""
        return self.key is not NOBODY_KEY

    @property
    def controls(self) -> bool:
        """A controller, and none that looks on: what it says prolongs the keep-alive."""
        return self.key.scope is Scope.ALL

    def require(self, needed: Scope) -> None:
        """Raises `Forbidden` unless the key may do that."""
        if self.key.scope < needed:
            raise Forbidden(f"the key {self.key.name} has the scope {self.key.scope.word}: this takes {needed.word}")

    def __str__(self) -> str:
        return f"key {self.key.name}" + (f" from {self.address}" if self.address else "")


NOBODY = Caller(NOBODY_KEY)


class Authenticator:
    """Compares keys in constant time. `key` is that of the settings, if there is one; others come and go.

    `certified`: nobody gets as far as this without a certificate, and one does without a key.
    """

    def __init__(self, key: str = "", certified: bool = False) -> None:
        # Told of each request that is refused for its key, with the reason; from two threads.
        self.refused: Callable[[str], None] = lambda _: None
        self.fixed = (Key(DEFAULT_KEY, Scope.ALL, digest_of(key)),) if key else ()
        self.certified = certified
        # Replaced as a whole: two threads read it.
        self.keys = self.fixed

    def replace(self, keys: Iterable[Key]) -> frozenset[Key]:
        """Have these beside the one of the settings. Returns those that are none any more."""
        before, self.keys = self.keys, (*self.fixed, *keys)
        return frozenset(before).difference(self.keys)

    def knows(self, key: Key) -> bool:
        """It is one still."""
        return key in self.keys or (self.certified and key is _CERTIFIED)

    def check(self, authorization: Iterable[str], x_api_key: Iterable[str]) -> Caller:
        """The caller. Every credential that is given must match, and be the same key; raises `Unauthenticated`."""
        bearer, keys = list(authorization), list(x_api_key)
        presented = [_token(value) for value in bearer] + keys
        found = {self._find(key) for key in presented} or {_CERTIFIED if self.certified else None}
        key = found.pop()
        if key is None or found:
            self.refused("wrong" if presented else "missing")
            raise Unauthenticated
        return Caller(key, dialect(keys))

    def _find(self, presented: str) -> Key | None:
        """All are compared, whichever is the right one."""
        digest = digest_of(presented)
        matches = [key for key in self.keys if hmac.compare_digest(digest, key.digest)]
        return matches[0] if matches else None


def bearer_of(value: str) -> str:
    """The value of an `Authorization`, where the password of a basic one is the key."""
    if value[: len(_BASIC)].lower() != _BASIC:
        return value
    try:
        words = b64decode(value[len(_BASIC) :].strip(), validate=True).decode("utf-8", "surrogateescape")
    except ValueError:  # not base 64, or not even ASCII
        return value
    return f"Bearer {words.partition(':')[2]}"


def _token(value: str) -> str:
    scheme, token = value[: len(_BEARER)], value[len(_BEARER) :]
    return token.strip() if scheme.lower() == _BEARER else ""
