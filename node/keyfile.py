"""Keys, what each may do, and the file that has several: one line `NAME SCOPE KEY` each. Pure: text in, keys out."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from node.settings import key_fault

# Keys of one file: each request is compared with all of them.
MAX_KEYS = 100
# What stands before the digest of a key that the file does not have itself.
DIGEST = "sha256:"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HEX = re.compile(r"[0-9A-Fa-f]{64}")


class Scope(IntEnum):
    """What a key may do; each also what those before it may."""

    METRICS = 1
    READ = 2
    ALL = 3

    @property
    def word(self) -> str:
        """As it is written in files and told to people."""
        return self.name.lower()


SCOPES = {scope.word: scope for scope in Scope}


@dataclass(frozen=True)
class Key:
    """One key, by its digest: the node has to recognise it, not to know it."""

    name: str
    scope: Scope
    digest: bytes = field(repr=False)


class BadKeys(Exception):
    """The keys cannot be used. The text has a fault in each line, and no key."""


def digest_of(key: str) -> bytes:
    """A key that is a UUID is the same in every spelling."""
    return hashlib.sha256(_canonical(key)).digest()


def parse(text: str, taken: Iterable[Key] = ()) -> tuple[Key, ...]:
    """The keys of a file; none may have a name, or be a key, of those that are `taken`. Raises `BadKeys`."""
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
        faults.append(f"there are more than {MAX_KEYS} keys")
    if faults:
        raise BadKeys("; ".join(faults))
    return tuple(found[begin:])


def parse_line(line: str) -> Key | None:
    """The key of one line, or nothing for an empty one and a comment. Raises `BadKeys`."""
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    if len(words) != 3:
        raise BadKeys("it is not NAME SCOPE KEY")
    name, scope, key = words
    require_name(name)
    if scope not in SCOPES:
        raise BadKeys(f"the scope of {name} is none of {', '.join(SCOPES)}")
    return Key(name, SCOPES[scope], _digest(name, key))


def require_name(name: str) -> None:
    """Raises `BadKeys` for what cannot be the name of a key."""
    if not _NAME.fullmatch(name):
        raise BadKeys("a name has 1 to 64 letters, digits and . _ @ -, and begins with a letter or a digit")


def line_of(key: Key) -> str:
    """The line that says this key by its digest."""
    return f"{key.name} {key.scope.word} {DIGEST}{key.digest.hex()}"


def _digest(name: str, key: str) -> bytes:
    if not key.startswith(DIGEST):
        if fault := key_fault(key):
            raise BadKeys(f"of {name}: {fault}")
        return digest_of(key)
    text = key.removeprefix(DIGEST)
    if not _HEX.fullmatch(text):
        raise BadKeys(f"of {name}: after {DIGEST} stand 64 hexadecimal digits")
    return bytes.fromhex(text)


def _require_new(key: Key, others: Iterable[Key]) -> None:
    for other in others:
        if key.name == other.name:
            raise BadKeys(f"there are two keys with the name {key.name}")
        if key.digest == other.digest:
            raise BadKeys(f"{key.name} and {other.name} are the same key")


def _canonical(key: str) -> bytes:
    try:
        return uuid.UUID(key).bytes
    except ValueError:
        return key.encode("utf-8", "surrogateescape")
