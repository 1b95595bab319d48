"""Taking over a core from the previous node process, or noticing that it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from twisted.internet.task import Clock

from drivers.process.child import CoreProcess
from drivers.process.recovered import recover
from node.contract.driver import Gone
from node.errors import CoreFailed
from protos.handover_pb2 import Output, Process


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def began(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])


def recovered(process: Process) -> None:
    clock = Clock()
    recover(cast(Any, clock), CoreProcess(clock, lambda lines: None), process)


def is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").exists()


@pytest.mark.parametrize("adopted", [False, True])
def test_a_core_whose_end_was_noticed(adopted: bool, child: subprocess.Popen[bytes], pipe: int) -> None:
    """Its descriptors are closed, so that years of upgrades do not leak them."""
    child.kill()
    child.wait()
    left = Process(pid=child.pid, began=7, adopted=adopted, outputs=[Output(number=1, descriptor=pipe)])
    with pytest.raises(Gone):
        recovered(left)
    assert not is_open(pipe)


@pytest.mark.parametrize("adopted", [False, True])
def test_a_reused_pid(adopted: bool, child: subprocess.Popen[bytes], pipe: int) -> None:
    """The core has ended, which is no reason to go back to the previous version."""
    other = began(child.pid) - 1
    left = Process(pid=child.pid, began=other, adopted=adopted, outputs=[Output(number=1, descriptor=pipe)])
    with pytest.raises(Gone):
        recovered(left)
    assert not is_open(pipe) and child.poll() is None


def test_a_process_of_another_parent() -> None:
    """It is not the core that was handed over."""
    with pytest.raises(CoreFailed):
        recovered(Process(pid=1, began=began(1)))
