"""What a controller sends: whole configurations, and users with their credentials and inbounds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from protos import service_pb2
from scripts.staging.core import Json, server_config
from scripts.staging.inbounds import Kind
from scripts.staging.users import TestUser


def backend_config(inbounds: Iterable[Json], **extra: object) -> str:
    """The JSON of a whole configuration; `extra` are more top-level keys, or others in the place of the usual ones."""
    return json.dumps({**server_config(inbounds), **extra})


def user(person: TestUser, places: Mapping[str, Kind]) -> service_pb2.User:
    """The user with the credentials and the tags of these inbounds (tag to kind); with none, the user's removal."""
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
    """A whole start for Xray; the rest as in `backend_config`."""
    return service_pb2.Backend(
        type=service_pb2.XRAY,
        config=backend_config(inbounds, **extra),
        users=users,
        keep_alive=keep_alive,
        exclude_inbounds=exclude,
    )


def chunks(users: Iterable[service_pb2.User], size: int = 100) -> list[service_pb2.UsersChunk]:
    """The users in chunks of `size`, as SyncUsersChunked takes them: numbered from 0, the last one marked."""
    everybody = list(users)
    parts = [everybody[start : start + size] for start in range(0, len(everybody), size)] or [[]]
    return [
        service_pb2.UsersChunk(users=part, index=index, last=index == len(parts) - 1)
        for index, part in enumerate(parts)
    ]
