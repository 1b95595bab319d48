"""gRPC's server reflection, for tools. Few nodes are ever asked, so its modules are imported with the first call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from node.base.aio import Aio  # noqa: F401 - first: it sets gRPC's environment

# isort: split
import grpc

_NAME = "grpc.reflection.v1alpha.ServerReflection"


class Reflection(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Describes these services, and itself."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = (*services, _NAME)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handler if details.method == f"/{_NAME}/ServerReflectionInfo" else None

    @cached_property
    def _handler(self) -> Any:
        from grpc_reflection.v1alpha import reflection, reflection_pb2

        return grpc.stream_stream_rpc_method_handler(
            reflection.aio.ReflectionServicer(self._services).ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
