"""Strangers, broken clients and strange controllers, made at random: the node serves on and finds no fault with itself.

`python -m scripts.attack` does the same for as long as one likes.
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
# Seconds that a controller may wait, over each protocol on a machine that runs other tests, too. It is less than one
# where nothing else is done.
PATIENCE = 5.0
# As many cases as there must have been: each takes some hundredths of a second.
FEWEST = 10


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with besieged(tmp_path_factory.mktemp("attacks")) as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
def test_an_attack(node: NodeProcess, kind: str) -> None:
    serve(node)
    report = siege(node, KINDS[kind], SECONDS)
    assert report.cases >= FEWEST
    assert report.slowest < PATIENCE
    assert report.memory < MEMORY


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_stream"])
def test_what_is_no_message_of_an_official_service(node: NodeProcess, kind: str) -> None:
    """Health and reflection take messages, too: what is none is an error of the caller's, as everywhere."""
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
