"""Signatures of files as `ssh-keygen -Y sign` writes them (OpenSSH, PROTOCOL.sshsig), of Ed25519 keys.

A signature is of the digest of a file, in a namespace: one that is made for another purpose is not valid here. Nothing
of it is read before its size and its form are known to be right.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from io import BufferedIOBase

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

# The most bytes of a signature: a real one has about 300.
LIMIT = 4096
# The most keys of one text: those of some releases, and of those who sign them.
KEYS = 100
_MAGIC = b"SSHSIG"
_VERSION = 1
_ED25519 = b"ssh-ed25519"
_HASHES = (b"sha256", b"sha512")
_ARMOR = re.compile(rb"-----BEGIN SSH SIGNATURE-----\n((?:[A-Za-z0-9+/=]{1,76}\n){1,50})-----END SSH SIGNATURE-----\n?")
# The type of the key, which base64 shows as the same letters in every key, and the key's 32 bytes.
_KEY = re.compile(r"(ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI[A-Za-z0-9+/]{43})([ \t].*)?")


class BadSignature(Exception):
    """A file is not signed by one of the keys, for the reason in the text."""


@dataclass(frozen=True)
class Signature:
    """What a signature claims; nothing of it is verified yet.

    `key` is an OpenSSH public key without a comment, `hash` the name of the file's digest, `signed` all that is signed
    before that digest, and `proof` the signature proper.
    """

    key: str
    namespace: str
    signed: bytes
    hash: str
    proof: bytes

    @classmethod
    def parse(cls, armored: bytes) -> Signature:
        """Read a signature. Raises `BadSignature` unless it is exactly as `ssh-keygen` writes it."""
        found = _ARMOR.fullmatch(armored) if len(armored) <= LIMIT else None
        if found is None:
            raise BadSignature("this is no signature of ssh-keygen")
        packed = _decoded(found[1].replace(b"\n", b""))
        if packed[: len(_MAGIC)] != _MAGIC or packed[len(_MAGIC) : len(_MAGIC) + 4] != _VERSION.to_bytes(4, "big"):
            raise BadSignature("this is no signature of ssh-keygen, or one of a newer kind")
        key, namespace, reserved, name, proof = _strings(packed[len(_MAGIC) + 4 :], 5)
        if name not in _HASHES:
            raise BadSignature("the signature is of a digest other than SHA-256 and SHA-512")
        _require_ed25519(key, 32)
        _require_ed25519(proof, 64)
        signed = _MAGIC + b"".join(map(_packed, (namespace, reserved, name)))
        line = f"ssh-ed25519 {base64.b64encode(key).decode()}"
        return cls(line, namespace.decode(errors="replace"), signed, name.decode(), proof[-64:])


def verify(armored: bytes, file: BufferedIOBase, keys: Collection[str], namespace: str) -> str:
    """Return which of these keys (as from `keys_of`) has signed the file. Raises `BadSignature`."""
    found = Signature.parse(armored)
    if found.namespace != namespace:
        raise BadSignature(f"the signature is for {found.namespace!r}, and not for {namespace!r}")
    if found.key not in keys:
        raise BadSignature(f"the signature is by another key: {found.key}")
    digest = hashlib.file_digest(file, found.hash).digest()
    try:
        raw = base64.b64decode(found.key.split()[1])[-32:]
        Ed25519PublicKey.from_public_bytes(raw).verify(found.proof, found.signed + _packed(digest))
    except InvalidSignature as error:
        raise BadSignature("the signature is of another file, or one of the two is damaged") from error
    return found.key


def keys_of(text: str) -> tuple[str, ...]:
    """Return the public keys, without comments, of a text with one in each line, or with commas between them.

    A line may be empty, or begin with #. Raises `ValueError` for anything else, and without a key.
    """
    lines = [line.strip() for line in re.split(r"[\n,]", text)]
    found = [_key(line) for line in lines if line and not line.startswith("#")]
    if not 0 < len(found) <= KEYS:
        raise ValueError(f"it has {len(found)} keys, and not 1 to {KEYS}")
    return tuple(dict.fromkeys(found))


def _key(line: str) -> str:
    found = _KEY.fullmatch(line)
    if found is None:
        raise ValueError(f"{line[:100]!r} is not an Ed25519 public key of OpenSSH: ssh-ed25519 AAAA... comment")
    return found[1]


def _decoded(text: bytes) -> bytes:
    """Decode base64, in the one spelling that these bytes have."""
    try:
        found = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise BadSignature("the signature is damaged: it is not base64") from error
    if base64.b64encode(found) != text:
        raise BadSignature("the signature is damaged: it is not base64")
    return found


def _strings(packed: bytes, count: int) -> list[bytes]:
    """Read this number of strings of SSH, each after its length. Raises `BadSignature` if they are not all there is."""

    def each() -> Iterator[bytes]:
        left = packed
        for _ in range(count):
            length = int.from_bytes(left[:4], "big")
            if len(left) < 4 + length:
                raise BadSignature("the signature is damaged: it ends too early")
            yield left[4 : 4 + length]
            left = left[4 + length :]
        if left:
            raise BadSignature("the signature is damaged: something follows it")

    return list(each())


def _require_ed25519(packed: bytes, length: int) -> None:
    """Raises `BadSignature` unless this is the name of the algorithm, and then so many bytes."""
    if packed[:-length] != _packed(_ED25519) + length.to_bytes(4, "big"):
        raise BadSignature("the signature is not one of an Ed25519 key")


def _packed(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text
