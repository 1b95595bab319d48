"""A node that treats any number of users as thousands: in its thread pool, in slices of one, with staged records."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

# The numbers of users or bytes up to which the node does work at once, and the sizes of its slices.
BOUNDS: Mapping[str, int] = {
    "node.backend.desired.BUILD_INLINE": 0,
    "node.backend.starts.READ_INLINE": 0,
    "node.backend.listing.TURN": 1,
    "node.backend.record.STAGED": 1,
    "node.limits.book.MANY": 0,
    "node.limits.enforcement.TURN": 1,
    "node.traffic.polling.SLICE": 1,
    "drivers.process.channel.SLICE": 1,
    "drivers.process.starting.BUILD_INLINE": 0,
    "drivers.process.starting.READ_INLINE": 0,
    "drivers.xray.connections.INLINE": 0,
}


def program(directory: Path) -> Path:
    """Write a program into this directory that is `twistd` with these bounds."""
    # By this name the node becomes the keeper.
    script = directory / "small-node" / "twistd"
    script.parent.mkdir(exist_ok=True)
    lines = [f"#!{sys.executable}", f"from {__name__} import run", "run()"]
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    return script


def run() -> None:
    """Set the bounds, then run `twistd`. Raises `AssertionError` if the node no longer has one of them."""
    for name, value in BOUNDS.items():
        module, _, bound = name.rpartition(".")
        owner = importlib.import_module(module)
        assert isinstance(getattr(owner, bound, None), int), f"the node has no {name}"
        setattr(owner, bound, value)
    importlib.import_module("twisted.scripts.twistd").run()
