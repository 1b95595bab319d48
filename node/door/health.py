"""The service grpc.health.v1: reports the state that was last set for each service."""

from __future__ import annotations

import asyncio
from typing import Any

from node.base.aio import Aio  # noqa: F401 - first: it sets gRPC's environment

# isort: split
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Replaces grpcio's servicer, which writes with its lock held: a watcher that reads nothing blocks all others."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        # Set at each change, and then replaced.
        self._news = asyncio.Event()

    def set(self, state: Any, *services: str) -> None:
        """Set the state of these services. To be called in the asyncio loop that serves them."""
        self._states |= dict.fromkeys(services, state)
        self._news.set()
        self._news = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(self, request: Any, context: Any) -> None:
        last = None
        while True:
            news, state = self._news, self._states.get(request.service, UNKNOWN)
            if state != last:
                await context.write(health_pb2.HealthCheckResponse(status=state))
            last = state
            await news.wait()
