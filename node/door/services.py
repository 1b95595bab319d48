"""Services of gRPC beside METHODS: health, with the state last set for each name, and reflection, for tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from node.base.aio import Aio  # noqa: F401 - first: it sets gRPC's environment

# isort: split
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from node.api.methods import SERVICE

_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Replaces grpcio's servicer, which writes with its lock held: a watcher that reads nothing blocks all others."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        # Set at each change, and then replaced.
        self._news = asyncio.Event()

    async def set(self, serving: bool, *services: str) -> None:
        """Set whether these services serve. To be awaited in the asyncio loop that serves them."""
        states = health_pb2.HealthCheckResponse
        self._states |= dict.fromkeys(services, states.SERVING if serving else states.NOT_SERVING)
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
            news, state = self._news, self._states.get(request.service, _UNKNOWN)
            if state != last:
                await context.write(health_pb2.HealthCheckResponse(status=state))
            last = state
            await news.wait()


class Reflection(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Describes these services, and itself. Few nodes are ever asked, so it imports its modules with the first call."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = (*services, _REFLECTION)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handler if details.method == f"/{_REFLECTION}/ServerReflectionInfo" else None

    @cached_property
    def _handler(self) -> Any:
        from grpc_reflection.v1alpha import reflection, reflection_pb2

        return grpc.stream_stream_rpc_method_handler(
            reflection.aio.ReflectionServicer(self._services).ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )


def add_services(server: Any, health: Health) -> None:
    """Add both to gRPC's server."""
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [service.full_name for service in (SERVICE, *health_pb2.DESCRIPTOR.services_by_name.values())]
    server.add_generic_rpc_handlers((Reflection(names),))
