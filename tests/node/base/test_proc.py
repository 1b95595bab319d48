"""What the kernel says of a process."""

from __future__ import annotations

import os
import subprocess
import sys

from node.base import proc
from scripts.staging.wait import until


def test_the_mark_of_a_process() -> None:
    """It stays the same while the process runs; a process that has ended has none, not even before it is reaped."""
    own = proc.mark(os.getpid())
    assert own == proc.mark(os.getpid()) and own.startswith(f"{proc.boot()}:{os.getpid()}:")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert proc.mark(child.pid) not in ("", own)
        child.kill()
        until(lambda: not proc.mark(child.pid), what="it has ended")
    assert proc.mark(child.pid) == "" == proc.mark(None)
