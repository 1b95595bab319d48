"""A controller in a separate process that calls GetBaseInfo every few milliseconds and measures its waits."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from protos.service_pb2 import Empty
from scripts.staging.node import NodeProcess
from scripts.staging.rpc import Rpc
from scripts.staging.target import Address

INTERVAL = 0.005


class Ticker:
    """Controls the process. `worst` returns the longest call in seconds since the last `worst`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def worst(self) -> float:
        self._pipe.send("worst")
        answer = self._pipe.recv()
        assert isinstance(answer, float)
        return answer


@contextmanager
def ticking(node: NodeProcess) -> Iterator[Ticker]:
    here, there = multiprocessing.Pipe()
    address = Address(node.host, node.rest_port, node.grpc_port, node.key, node.pem)
    process = multiprocessing.get_context("spawn").Process(target=_tick, args=(address, there), daemon=True)
    process.start()
    try:
        here.recv()
        yield Ticker(here)
    finally:
        here.send("end")
        process.join()


def _tick(address: Address, pipe: Connection) -> None:
    with Rpc(address) as rpc:
        rpc.GetBaseInfo(Empty())
        pipe.send("ready")
        worst = 0.0
        while True:
            begun = time.perf_counter()
            rpc.GetBaseInfo(Empty())
            took = time.perf_counter() - begun
            worst = max(worst, took)
            if pipe.poll(max(0.0, INTERVAL - took)):
                if pipe.recv() == "end":
                    return
                pipe.send(worst)
                worst = 0.0
