"""Raw gRPC calls to the node: every method by its path; unary or stream comes from the descriptor."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from protos import service_pb2
from scripts.staging.target import Dialect, Target, credentials

SERVICE = service_pb2.DESCRIPTOR.services_by_name["NodeService"]
_LIMIT = 64 * 1024 * 1024
_OPTIONS = [
    ("grpc.max_send_message_length", _LIMIT),
    ("grpc.max_receive_message_length", _LIMIT),
    ("grpc.use_local_subchannel_pool", 1),
    # With the default, a call during a short close of the port waits a second for the next attempt.
    ("grpc.initial_reconnect_backoff_ms", 100),
]


class Rpc:
    """Calls one node over its own channel; each method of the service is an attribute of that name.

    `rpc.Start(Backend(...), timeout=5)`; client streams take an iterator, server streams return one (with `cancel`).
    Errors are `grpc.RpcError`. `key` (default: the node's) and `dialect` select the credentials of every call.
    """

    def __init__(
        self, node: Target, key: str | None = None, dialect: Dialect = "bearer", timeout: float = 30.0
    ) -> None:
        pinned = grpc.ssl_channel_credentials(node.pem.encode())
        self.channel = grpc.secure_channel(f"{node.host}:{node.grpc_port}", pinned, _OPTIONS)
        self._metadata = tuple(credentials(node.key if key is None else key, dialect).items())
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = SERVICE.methods_by_name.get(name)
        if method is None:
            raise AttributeError(f"{SERVICE.full_name} has no method {name}")
        return self._callable(method)

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _callable(self, method: MethodDescriptor) -> Callable[..., Any]:
        """The method with the default timeout; server streams, which stay open, have none."""
        make = getattr(self.channel, _kind(method))
        call = make(
            f"/{SERVICE.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        limit = None if method.server_streaming else self._timeout

        def invoke(request: Any, timeout: float | None = limit, **more: Any) -> Any:
            return call(request, timeout=timeout, metadata=self._metadata, **more)

        return invoke


def _kind(method: MethodDescriptor) -> str:
    sides = (method.client_streaming, method.server_streaming)
    return "_".join("stream" if streaming else "unary" for streaming in sides)
