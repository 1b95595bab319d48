"""Files of users: JSON, an array of users as the interface has them, or an object with `users`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from node.nodectl.exits import Unusable
from protos import service_pb2 as pb


def read(path: Path) -> list[pb.User]:
    """The users of this file. Raises `Unusable`."""
    try:
        return parse(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise Unusable(f"{path} cannot be used: {error}")


def parse(text: str) -> list[pb.User]:
    """The users of a text. Raises `ValueError`."""
    said = json.loads(text)
    users = said.get("users") if isinstance(said, dict) else said
    if not isinstance(users, list):
        raise ValueError("it is neither an array of users nor an object with users")
    return [_user(number, user) for number, user in enumerate(users, 1)]


def _user(number: int, said: Any) -> pb.User:
    try:
        user = ParseDict(said, pb.User())
    except (ParseError, AttributeError, TypeError) as error:
        raise ValueError(f"user {number}: {error}") from error
    if not user.email:
        raise ValueError(f"user {number} has no email")
    return user
