"""API keys, their scopes, and the key file with one line `NAME SCOPE KEY` each. Pure: text in, keys out."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from base64 import b32encode
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from node.keys.options import key_fault

# Keys of one file. There is a limit because each request is compared with all of them.
MAX_KEYS = 100
# Begins the third word of a line that has the digest of a key instead of the key.
DIGEST = "sha256:"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HEX = re.compile(r"[0-9A-Fa-f]{64}")


class Scope(IntEnum):
    """The calls that a key allows. Each scope includes those before it."""

    METRICS = 1
    READ = 2
    ALL = 3

    @property
    def word(self) -> str:
        """The scope as the key file, logs and errors spell it."""
        return self.name.lower()


SCOPES = {scope.word: scope for scope in Scope}


@dataclass(frozen=True)
class Key:
    """One key: its name, scope and digest. The node recognises a key by its digest, and does not keep the key."""

    name: str
    scope: Scope
    digest: bytes = field(repr=False)


class BadKeys(Exception):
    """The keys cannot be used. The text lists the faults, and never has a key."""


def digest_of(key: str) -> bytes:
    """Return the SHA-256 digest of a key. All spellings of a UUID have the same digest."""
    return hashlib.sha256(_canonical(key)).digest()


def door_name(key: str) -> str:
    """Derive the secret host name of a node with this API key: HKDF with SHA-256 (RFC 5869), so it hides the key."""
    secret = hmac.digest(bytes(32), digest_of(key), "sha256")
    label = b32encode(hmac.digest(secret, b"DOOR_NAME\x01", "sha256")[:15]).decode().lower()
    return f"{label}.internal"


def parse(text: str, taken: Iterable[Key] = ()) -> tuple[Key, ...]:
    """Parse the text of a key file. No name and no key may be among `taken`. Raises `BadKeys`."""
    found, faults = list(taken), list[str]()
    begin = len(found)
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if (key := parse_line(line)) is not None:
                _require_new(key, found)
                found.append(key)
        except BadKeys as fault:
            faults.append(f"line {number}: {fault}")
    if len(found) - begin > MAX_KEYS:
        faults.append(f"more than {MAX_KEYS} keys")
    if faults:
        raise BadKeys("; ".join(faults))
    return tuple(found[begin:])


def parse_line(line: str) -> Key | None:
    """Parse one line; None for an empty one and a comment. Raises `BadKeys`."""
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    if len(words) != 3:
        raise BadKeys("expected NAME SCOPE KEY")
    name, scope, key = words
    require_name(name)
    if scope not in SCOPES:
        raise BadKeys(f"the scope of {name} must be one of {', '.join(SCOPES)}")
    return Key(name, SCOPES[scope], _digest(name, key))


def require_name(name: str) -> None:
    """Raise `BadKeys` for an invalid name of a key."""
    if not _NAME.fullmatch(name):
        raise BadKeys("a name has 1 to 64 letters, digits and . _ @ -, and begins with a letter or a digit")


def line_of(key: Key) -> str:
    """Format the line of a key, with its digest."""
    return f"{key.name} {key.scope.word} {DIGEST}{key.digest.hex()}"


def _digest(name: str, key: str) -> bytes:
    if not key.startswith(DIGEST):
        if fault := key_fault(key):
            raise BadKeys(f"key {name}: {fault}")
        return digest_of(key)
    text = key.removeprefix(DIGEST)
    if not _HEX.fullmatch(text):
        raise BadKeys(f"key {name}: {DIGEST} must be followed by 64 hexadecimal digits")
    return bytes.fromhex(text)


def _require_new(key: Key, others: Iterable[Key]) -> None:
    for other in others:
        if key.name == other.name:
            raise BadKeys(f"two keys with the name {key.name}")
        if key.digest == other.digest:
            raise BadKeys(f"{key.name} and {other.name} are the same key")


def _canonical(key: str) -> bytes:
    try:
        return uuid.UUID(key).bytes
    except ValueError:
        return key.encode("utf-8", "surrogateescape")
