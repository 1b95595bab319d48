"""The buttons of a deployed panel: update the node, the core or the geo files, and reset the node. REST with JSON.

Each is a job, and is answered when the job has ended. Paths, bodies and waits: the panel's client library 0.9.4, which
shows `detail` of the reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from twisted.internet.defer import TimeoutError as Waited
from twisted.internet.interfaces import IReactorTime

from node.api.pages import Answer, Button, Page, answer
from node.base.errors import InvalidRequest, NodeError, shown
from node.updates.jobs import DONE, FAILED
from node.updates.policy import REGIONS
from node.updates.updates import Updates
from protos.service_pb2 import Job, UpdateGeoFilesRequest

# Seconds that the panel waits, less a reserve: 330 for updates, 90 for a reset.
UPDATED, RESET = 300.0, 80.0
_VERSION = re.compile(r"latest|v?(\d{1,5}\.\d{1,5}\.\d{1,5})", re.ASCII)


class Buttons:
    """The buttons. The panel reads `ROOT` before each of them."""

    def __init__(self, reactor: IReactorTime, updates: Updates) -> None:
        self._reactor = reactor
        self._updates = updates

    def all(self) -> Sequence[Button]:
        rows: Sequence[tuple[str, Callable[[dict[str, Any]], Job], float]] = (
            ("/node/update", lambda _: self._updates.newest_node(), UPDATED),
            ("/node/core_update", self._core, UPDATED),
            ("/node/geofiles", self._geo, UPDATED),
            ("/node/hard_reset", lambda _: self._updates.reset(), RESET),
        )
        return [Button(path, partial(self._press, ask, seconds)) for path, ask, seconds in rows]

    async def _press(self, ask: Callable[[dict[str, Any]], Job], seconds: float, body: bytes) -> Answer:
        """Begin the job that `ask` makes of a request, and answer when it has ended, or after so many seconds."""
        try:
            job = ask(_read(body))
        except NodeError as error:
            return answer(error.http, error.text)
        try:
            await self._updates.jobs.ended(job).addTimeout(seconds, self._reactor)
        except Waited:
            return answer(202, f"{job.text}; the job {job.id} goes on")
        await self._updates.jobs.written()
        if job.state == FAILED:
            return answer(500, job.text)
        if job.state == DONE:
            return answer(200, job.text)
        if self._updates.jobs.goes_on(job):
            return answer(200, f"the next process of the node takes over; the job {job.id} has the result")
        return answer(503, "the node is being upgraded: ask again")

    def _core(self, asked: dict[str, Any]) -> Job:
        version = _VERSION.fullmatch(str(asked.get("core_version", "")))
        if version is None:
            raise InvalidRequest("core_version must be latest, or a version such as v26.7.28")
        return self._updates.newest_core(version[1] or "")

    def _geo(self, asked: dict[str, Any]) -> Job:
        region = str(asked.get("region", ""))
        if region not in REGIONS:
            raise InvalidRequest(f"{shown(region)} is none of the regions {', '.join(REGIONS)}")
        return self._updates.geo(UpdateGeoFilesRequest(), region)


async def _root(_: str, __: bool) -> Answer:
    """Any reply with 200 means that the node is there."""
    return answer(200, "ok")


def _read(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request; no body is an empty one. Raises `InvalidRequest`."""
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest("the body is not a JSON object")
    return found


ROOT = Page("/", _root)
