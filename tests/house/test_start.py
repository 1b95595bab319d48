"""What a node imports before it serves: each module costs every start time and every node memory."""

from __future__ import annotations

import subprocess
import sys

# What most nodes never use, or not before somebody asks; what is only for clients and the command line.
LATER = {
    "automat",
    "click",
    "drivers.sing_box.driver",
    "drivers.xray.driver",
    "grpc_reflection.v1alpha",
    "rich",
    "treq",
}


def test_what_is_not_imported() -> None:
    """`node.tap` has all of the node but what comes later."""
    program = f"import sys, node.tap; print(*({LATER!r} & sys.modules.keys()))"
    assert not subprocess.check_output([sys.executable, "-c", program], text=True).split()


def test_garbage_is_looked_for() -> None:
    """Again, once everything is imported; not among that."""
    program = "import gc, node.tap; print(gc.isenabled(), gc.get_freeze_count() > 10_000)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True True\n"
