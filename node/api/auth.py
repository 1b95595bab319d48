"""Authentication by API key, as `Authorization: Bearer` or as `x-api-key`, and the dialect of each caller."""

from __future__ import annotations

import hmac
from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from node.base.errors import Forbidden, Unauthenticated
from node.keys.keyfile import Key, Scope, digest_of
from node.keys.options import DEFAULT_KEY

_BEARER = "bearer "
_BASIC = "basic "
# The key of callers without one, on pages that are open to them.
NO_KEY = Key("none", Scope.METRICS, b"")
# The key of callers with a client certificate, where that replaces a key (CLIENT_CERTIFICATE=instead).
_CERTIFIED = Key("certificate", Scope.ALL, b"")


class Dialect(Enum):
    """The formats that a caller expects beside the messages: those of the interface document, or of deployed clients.

    Deployed clients send `x-api-key` and parse plain-text errors and bare log lines.
    """

    DOCUMENT = "document"
    DEPLOYED = "deployed"


def dialect(x_api_key: Iterable[str]) -> Dialect:
    """Return the dialect of a request: the deployed one if it has an `x-api-key`, valid or not."""
    return Dialect.DEPLOYED if any(True for _ in x_api_key) else Dialect.DOCUMENT


@dataclass(frozen=True)
class Caller:
    """The caller of a request: key, dialect and address."""

    key: Key
    dialect: Dialect = Dialect.DOCUMENT
    address: str = ""

    @property
    def known(self) -> bool:
        """Whether the caller has a key."""
        return self.key is not NO_KEY

    @property
    def controls(self) -> bool:
        """Whether the caller is a controller, and not an observer: only a controller's calls prolong the keep-alive."""
        return self.key.scope is Scope.ALL

    def require(self, needed: Scope) -> None:
        """Raise `Forbidden` unless the key has this scope."""
        if self.key.scope < needed:
            has = self.key.scope.word
            raise Forbidden(f"the key {self.key.name} has the scope {has}: this call needs {needed.word}")

    def __str__(self) -> str:
        return f"key {self.key.name}" + (f" from {self.address}" if self.address else "")


ANONYMOUS = Caller(NO_KEY)


class Authenticator:
    """Checks keys, by comparisons in constant time. `key` is API_KEY, if set; those of the key file may change.

    `certified`: every client has shown a certificate in the TLS handshake, and needs no key.
    """

    def __init__(self, key: str = "", certified: bool = False, refused: Callable[[str], None] = lambda _: None) -> None:
        """`refused` is called with the reason for each request that is refused for its key; from two threads."""
        self.refused = refused
        self.fixed = (Key(DEFAULT_KEY, Scope.ALL, digest_of(key)),) if key else ()
        self.certified = certified
        # Replaced as a whole: two threads read it.
        self.keys = self.fixed

    def replace(self, keys: Iterable[Key]) -> frozenset[Key]:
        """Replace the keys of the key file; API_KEY stays. Returns those that are no longer valid."""
        before, self.keys = self.keys, (*self.fixed, *keys)
        return frozenset(before).difference(self.keys)

    def knows(self, key: Key) -> bool:
        """Return whether the key is still valid."""
        return key in self.keys or (self.certified and key is _CERTIFIED)

    def check(self, authorization: Iterable[str], x_api_key: Iterable[str]) -> Caller:
        """Return the caller. All given credentials must be the same valid key. Raises `Unauthenticated`."""
        bearer, keys = list(authorization), list(x_api_key)
        key = self._key(bearer, keys)
        if key is None:
            self.refused("wrong" if bearer or keys else "missing")
            raise Unauthenticated
        return Caller(key, dialect(keys))

    def lets_in(self, authorization: Sequence[str], x_api_key: Sequence[str]) -> bool:
        """Return whether `check` would succeed. A failure is not counted: `check` is called later, and counts it."""
        return self._key(authorization, x_api_key) is not None

    def _key(self, authorization: Sequence[str], x_api_key: Sequence[str]) -> Key | None:
        presented = [*map(_token, authorization), *x_api_key]
        found = {self._find(key) for key in presented} or {_CERTIFIED if self.certified else None}
        key = found.pop()
        return None if found else key

    def _find(self, presented: str) -> Key | None:
        """Find the key. All are compared, so that the time does not depend on which one matches."""
        digest = digest_of(presented)
        matches = [key for key in self.keys if hmac.compare_digest(digest, key.digest)]
        return matches[0] if matches else None


def bearer_of(value: str) -> str:
    """Turn the value of a basic `Authorization` into a bearer one, with its password as the key."""
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
