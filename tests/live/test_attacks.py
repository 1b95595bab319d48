"""Fuzzing by strangers, broken clients and odd controllers: the node serves on and logs no internal error.

`python -m scripts.attack` does the same for any duration.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from scripts.attack.kinds import KINDS
from scripts.attack.siege import MEMORY, besieged, serve, siege
from scripts.staging.node import NodeProcess
from scripts.staging.rpc import Rpc
from scripts.staging.target import credentials

SECONDS = 2.0
# Seconds that a controller may wait, over each protocol, while the machine runs other tests. On an idle machine it is
# less than one.
PATIENCE = 5.0
# The minimum number of cases: each takes some hundredths of a second.
FEWEST = 10


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with besieged(tmp_path_factory.mktemp("attacks")) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_attack(node: NodeProcess, kind: str) -> None:
    serve(node)
    report = siege(node, KINDS[kind], SECONDS)
    assert report.cases >= FEWEST
    assert report.slowest < PATIENCE
    assert report.memory < MEMORY


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_stream"])
def test_what_is_no_message_of_an_official_service(node: NodeProcess, kind: str) -> None:
    """Invalid messages to health and reflection are errors of the caller, as everywhere."""
    paths = {
        "unary_unary": f"/{health.SERVICE_NAME}/Check",
        "unary_stream": f"/{health.SERVICE_NAME}/Watch",
        "stream_stream": f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
    }
    with Rpc(node) as rpc, pytest.raises(grpc.RpcError) as refused:
        call = getattr(rpc.channel, kind)(paths[kind])
        content = b"\x0a\x05ab"
        answer = call(
            iter([content]) if kind == "stream_stream" else content,
            metadata=tuple(credentials(node.key, "bearer").items()),
            timeout=10,
        )
        list(answer)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not [line for line in node.lines if "Traceback" in line]
