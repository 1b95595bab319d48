"""Messages of a controller: whole configurations, and users with their credentials and inbounds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from protos import service_pb2
from scripts.staging.core import Json, server_config
from scripts.staging.inbounds import Kind
from scripts.staging.users import TestUser


def backend_config(inbounds: Iterable[Json], **extra: object) -> str:
    """The JSON of a whole configuration; `extra` adds top-level keys, or replaces the default ones."""
    return json.dumps({**server_config(inbounds), **extra})


def user(person: TestUser, places: Mapping[str, Kind]) -> service_pb2.User:
    """The user with the credentials and the tags of these inbounds (tag to kind); without any it removes the user."""
    message = service_pb2.User(email=person.email, inbounds=list(places))
    for kind in places.values():
        message.proxies.MergeFrom(kind.proxy(person))
    return message


def backend(
    inbounds: Iterable[Json],
    users: Iterable[service_pb2.User] = (),
    keep_alive: int = 0,
    exclude: Iterable[str] = (),
    **extra: object,
) -> service_pb2.Backend:
    """A complete Start request for Xray; `inbounds` and `extra` are as in `backend_config`."""
    return service_pb2.Backend(
        type=service_pb2.XRAY,
        config=backend_config(inbounds, **extra),
        users=users,
        keep_alive=keep_alive,
        exclude_inbounds=exclude,
    )


def chunks(users: Iterable[service_pb2.User], size: int = 100) -> list[service_pb2.UsersChunk]:
    """The users in chunks of `size`, as SyncUsersChunked takes them: numbered from 0, the last one marked."""
    everyone = list(users)
    parts = [everyone[start : start + size] for start in range(0, len(everyone), size)] or [[]]
    return [
        service_pb2.UsersChunk(users=part, index=index, last=index == len(parts) - 1)
        for index, part in enumerate(parts)
    ]
