"""A test user with all credentials that a controller would give them."""

from __future__ import annotations

import base64
import hashlib
import secrets
import uuid
from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True)
class TestUser:
    """A user. `email` is the name under which the node counts traffic; protocols use the UUID or the password."""

    __test__: ClassVar[bool] = False  # for pytest: not a class of tests, despite its name

    email: str
    uuid: str
    password: str

    @classmethod
    def new(cls, email: str) -> Self:
        return cls(email, str(uuid.uuid4()), secrets.token_urlsafe(16))


def shadowsocks_2022_key(password: str, size: int) -> str:
    """The key of `size` bytes that deployed controllers put into a user's link, as Base64.

    The password itself if it is such a key already, else the first bytes of its SHA-256.
    """
    try:
        if len(base64.b64decode(password, validate=True)) == size:
            return password
    except ValueError:
        pass
    return base64.b64encode(hashlib.sha256(password.encode()).digest()[:size]).decode()
