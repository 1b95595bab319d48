"""Parse credentials as the cores do. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

from node.contract.accounts import Unusable
from protos.service_pb2 import User

# The key sizes in bytes of the Shadowsocks-2022 methods that support several users.
KEY_BYTES = {"2022-blake3-aes-128-gcm": 16, "2022-blake3-aes-256-gcm": 32}

_NO_UUID = "the id is not a UUID"
_UUID = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")


def parse_uuid(text: str) -> tuple[str, bytes]:
    """Parse a UUID: its canonical text and its bytes. Other text of 1 to 30 bytes is hashed to one, as in the cores.

    Raises `Unusable`.
    """
    digits = text.replace("-", "")
    # A fast path: nearly all are canonical, and there may be 100,000. A match takes twice as long.
    if len(text) == 36 and len(digits) == 32 and text[8:24:5] == "----":
        try:
            identity = bytes.fromhex(digits)
        except ValueError as error:
            raise Unusable(_NO_UUID) from error
        if identity.hex() == digits:
            return text, identity
    identity = _identity(text)
    digits = identity.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}", identity


def _identity(text: str) -> bytes:
    raw = text.encode()
    if len(raw) <= 30:
        digest = bytearray(hashlib.sha1(bytes(16) + raw, usedforsecurity=False).digest()[:16])
        digest[6] = digest[6] & 0x0F | 5 << 4
        digest[8] = digest[8] & 0x3F | 2 << 6
        return bytes(digest)
    if not _UUID.fullmatch(text):
        raise Unusable(_NO_UUID)
    return bytes.fromhex(text.replace("-", ""))


def shadowsocks_2022_key(password: str, size: int) -> bytes:
    """Derive the key as clients do: decode base64 of `size` bytes, else cut the password's SHA-256 to that size."""
    try:
        key = base64.b64decode(password, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    return key if len(key) == size else hashlib.sha256(password.encode()).digest()[:size]


def require_usable(user: User) -> None:
    """Raises `Unusable` if the only credential of a user is for masque, which takes no users here.

    Beside other credentials it is ignored: controllers send all of them with every user.
    """
    has = user.proxies
    if not getattr(has.masque, "pass"):
        return
    others = (has.vmess.id, has.vless.id, has.trojan.password, has.shadowsocks.password)
    if not any((*others, has.hysteria.auth, has.wireguard.public_key)):
        raise Unusable("the user has only a masque credential, and this node has no inbounds with masque users")
