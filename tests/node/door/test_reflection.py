"""Server reflection, as tools call it, over a server of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from node.door.rpc import Reflection
from protos.service_pb2 import DESCRIPTOR

# isort: split
import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

SERVICE = DESCRIPTOR.services_by_name["NodeService"].full_name


async def asked(directory: Path, *requests: Any) -> list[Any]:
    """The answers of a server that reflects the node's service."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Reflection([SERVICE]),))
    server.add_insecure_port(address := f"unix:{directory}/grpc.sock")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(
                f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )(requests)
            return [answer async for answer in call]
    finally:
        await server.stop(None)


def test_reflection(tmp_path: Path) -> None:
    """It lists the services and itself, and describes them; for unknown ones it answers with an error."""
    question = reflection_pb2.ServerReflectionRequest
    services, described, unknown = asyncio.run(
        asked(
            tmp_path,
            question(list_services=""),
            question(file_containing_symbol=SERVICE),
            question(file_containing_symbol="no.such.Service"),
        )
    )
    assert {service.name for service in services.list_services_response.service} == {SERVICE, reflection.SERVICE_NAME}
    assert DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
