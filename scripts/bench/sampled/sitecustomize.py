"""Sampling profiler inside a node: the interpreter imports it at start; it samples all stacks while a file exists.

A stack weighs the processor time that its thread has used since the last sample. `TXNODE_SAMPLES` is the output file;
sampling goes on while the file with `.on` appended exists. Lines are `thread;outermost;...;innermost microseconds`, the
format of flame graph tools.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

_INTERVAL = 0.001
_ASKED = 0.02


def _sample(out: Path, switch: Path) -> None:
    while True:
        if not switch.exists():
            time.sleep(_ASKED)
            continue
        sums: Counter[str] = Counter()
        clocks = _clocks()
        while switch.exists():
            time.sleep(_INTERVAL)
            clocks = _look(sums, clocks)
        part = out.with_suffix(".part")
        part.write_text("".join(f"{stack} {nanoseconds // 1000}\n" for stack, nanoseconds in sums.items()))
        part.rename(out)


def _look(sums: Counter[str], before: dict[int, int]) -> dict[int, int]:
    frames, clocks = sys._current_frames(), _clocks()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, now in clocks.items():
        used = now - before.get(ident, now)
        if used and ident in frames:
            sums[";".join((names[ident], *_stack(frames[ident])))] += used
    return clocks


def _clocks() -> dict[int, int]:
    """Processor nanoseconds of each Python thread. Threads must not end meanwhile; those of a node do not."""
    idents = [thread.ident for thread in threading.enumerate() if thread.ident is not None]
    return {ident: time.clock_gettime_ns(time.pthread_getcpuclockid(ident)) for ident in idents}


def _stack(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        found.append(f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


if "TXNODE_SAMPLES" in os.environ:
    _out = Path(os.environ["TXNODE_SAMPLES"])
    threading.Thread(target=_sample, args=(_out, Path(f"{_out}.on")), name="sampler", daemon=True).start()
