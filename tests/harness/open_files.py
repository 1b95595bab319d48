"""The files that the tests' process has open."""

from __future__ import annotations

import gc
from contextlib import suppress
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
