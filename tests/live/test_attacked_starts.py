"""Fuzzed configurations in Starts: the node replies to each in time, and takes no harm."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from random import Random

import psutil
import pytest

from protos import service_pb2
from scripts.attack import samples
from scripts.attack.mutation import mutate, text_of
from scripts.staging.controller import Controller, ControllerError
from scripts.staging.core import Json
from scripts.staging.node import ROOMY, NodeProcess
from scripts.staging.ports import free_port
from tests.conftest import control

TIMES = 15 * int(os.environ.get("TXNODE_ATTACKS", "1"))
# The errors of a Start that are the caller's fault.
THEIRS = ("400", "413", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
# Seconds that a Start may take with its checks, on a busy machine; bytes that the node may keep after all.
START, KEPT = 15.0, 64 * 1024**2


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node"), **ROOMY) as node:
        yield node


def spoiled(sample: Callable[..., Json], random: Random) -> str:
    """A fuzzed configuration that fits into protobuf: its strings are valid Unicode."""
    made = json.dumps(sample(*(free_port() for _ in range(8))))
    text = text_of(mutate(made.replace("geoip:private", "10.0.0.0/8"), random), random)
    return text.encode(errors="replace").decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sample"), [(service_pb2.XRAY, samples.xray), (service_pb2.SING_BOX, samples.sing_box)]
)
@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_spoiled_starts(
    attacked: NodeProcess, transport: str, kind: service_pb2.BackendType, sample: Callable[..., Json]
) -> None:
    """Each is accepted or refused as the caller's fault; the node serves on."""
    with control(attacked, transport) as controller:
        before = psutil.Process(attacked.pid).memory_info().rss
        for seed in range(TIMES):
            began = time.monotonic()
            fault = _start(controller, kind, spoiled(sample, Random(seed)))
            assert fault in (None, *THEIRS), f"seed {seed}: {fault}"
            assert time.monotonic() - began < START, f"seed {seed}"
        assert psutil.Process(attacked.pid).memory_info().rss - before < KEPT
        controller.stop()
    assert not [line for line in attacked.lines if "Traceback" in line or "Unhandled" in line]


def _start(controller: Controller, kind: service_pb2.BackendType, text: str) -> str | None:
    try:
        controller.start(service_pb2.Backend(type=kind, config=text))
    except ControllerError as error:
        return error.status if error.status in THEIRS else f"{error}"
    return None
