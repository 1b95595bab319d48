"""Upgrade a node in place, for tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from scripts.staging.node import NodeProcess
from scripts.staging.process import Child
from scripts.staging.version import Version
from scripts.staging.wait import until

READY, FAILED = "is ready", "the node was not upgraded"


class RealNode(NodeProcess):
    """A node that is executed, not forked, so that it can execute itself again."""

    child = Child


def kept(node: NodeProcess) -> None:
    """Wait until the node has kept a copy of its version to go back to."""
    until(lambda: (node.state / "program" / "twisted").is_dir(), 10, "the way back is kept")


def said(node: NodeProcess, words: str) -> int:
    """How many of the node's lines contain these words."""
    return sum(words in line for line in node.lines)


def upgrade(node: NodeProcess, words: str = READY, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Send the upgrade signal, and wait for another line with these words; do something during that."""
    pid, before = node.pid, said(node, words)
    os.kill(pid, signal.SIGUSR2)
    meanwhile()
    until(lambda: said(node, words) > before, 40, f"the node logs {words!r} again")
    assert node.pid == pid


def die_in_between(version: Version, core: int) -> None:
    """Kill this core between the two versions: when the next one begins, but not in its trial run."""
    die = f"import os\n_start = Arrival.start\ndef _die(self):\n    _start(self)\n    os.kill({core}, 9)\n"
    version.add("node/handover/arrival.py", f"{die}Arrival.start = _die")
