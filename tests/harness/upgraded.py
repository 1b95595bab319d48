"""A node that becomes another version of itself, for the tests of upgrades in place."""

from __future__ import annotations

import os
import signal

from scripts.staging.node import NodeProcess
from scripts.staging.process import Child
from scripts.staging.version import Version
from scripts.staging.wait import until

READY, FAILED = "is ready", "the node was not upgraded"


class RealNode(NodeProcess):
    """Not a copy of an interpreter: what it was run as it can be run as again."""

    child = Child


def kept(node: NodeProcess) -> None:
    """Wait until it has its way back."""
    until(lambda: (node.state / "program" / "twisted").is_dir(), 10, "the way back is kept")


def said(node: NodeProcess, words: str) -> int:
    """How often the node has said so."""
    return sum(words in line for line in node.lines)


def upgrade(node: NodeProcess, words: str = READY) -> None:
    """Ask for it, and wait until the node has said these words once more."""
    pid, before = node.pid, said(node, words)
    os.kill(pid, signal.SIGUSR2)
    until(lambda: said(node, words) > before, 40, f"the node says {words!r} again")
    assert node.pid == pid


def die_in_between(version: Version, core: int) -> None:
    """Have this core die while there is no node: when the next version begins, and not when that is tried."""
    die = f"if VARIABLE in os.environ:\n    with suppress(OSError): os.kill({core}, 9)"
    version.add("node/upgrade/handle.py", die)
