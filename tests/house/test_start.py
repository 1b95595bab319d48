"""What a node imports before it serves: each module costs time at each start, and memory in each node."""

from __future__ import annotations

import subprocess
import sys

# What most nodes never use, or only on request; what only clients and the command line use.
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
    """Importing `node.tap` imports the node without these modules."""
    program = f"import sys, node.tap; print(*({LATER!r} & sys.modules.keys()))"
    assert not subprocess.check_output([sys.executable, "-c", program], text=True).split()


def test_garbage_collection_is_on() -> None:
    """It is on again after the imports, but off during them."""
    program = "import gc, node.tap; print(gc.isenabled(), gc.get_freeze_count() > 10_000)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True True\n"
