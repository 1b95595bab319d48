"""Whether this Python was built for speed: a plain build needs more processor time. Standard library only.

As a program, it exits with 0 if so: `scripts/setup` asks each Python of the machine.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def is_optimised() -> bool:
    """Whether the compiler used a profile, or optimised at link time."""
    maps = Path("/proc/self/maps").read_text()
    return optimised(sysconfig.get_config_var("CONFIG_ARGS") or "", shared="/libpython" in maps)


def optimised(arguments: str, shared: bool) -> bool:
    """The same for these arguments of Python's `configure`; `shared`: the interpreter is in a shared library.

    Debian and Ubuntu record the arguments of the shared library, and build the interpreter again without it, optimised.
    """
    words = arguments.replace("'", " ").split()
    named = any(word.startswith(("--enable-optimizations", "--with-lto")) for word in words)
    return named or ("--enable-shared" in words and not shared)


if __name__ == "__main__":
    sys.exit(not is_optimised())
