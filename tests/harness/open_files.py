"""The files that the tests' process has open."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from scripts.staging.ports import marks


def open_files() -> dict[str, str]:
    """These files by descriptor, without the marks of the ports that tests have taken."""
    # Garbage of earlier tests may have files open until it is collected, such as the traceback of an expected error.
    gc.collect()
    own = {str(mark.fileno()) for mark in marks}
    found = {}
    for each in Path("/proc/self/fd").iterdir():
        # Threads of other tests may close one meanwhile.
        with suppress(FileNotFoundError):
            found[each.name] = str(each.readlink())
    return {number: name for number, name in found.items() if number not in own}


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Let this process have so many more files open inside the block than its soft limit, which is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + count, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def many_files(count: int) -> Iterator[None]:
    """Have so many more files open inside the block."""
    with room_for(count), ExitStack() as stack:
        for _ in range(count):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
