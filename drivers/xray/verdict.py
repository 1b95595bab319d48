"""Run Xray's commands that check a configuration, and parse why it refused one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from drivers.process import readiness as starting
from drivers.process.child import CoreProcess
from drivers.process.executable import Executable
from node.contract.driver import Done

# The arguments that convert a configuration to the core's own message.
CONVERT = ("convert", "pb", "-outpbfile", "/dev/fd/3", "stdin:")
# Xray's exit code for an invalid configuration; a port in use gives another.
REFUSED = 23
# How the output of its commands begins when they refuse a configuration.
_VERDICT = re.compile(r"^failed to ", re.IGNORECASE)
_CHATTER = re.compile(r"^(\d{4}/\d\d/\d\d |Output ProtoBuf file|Xray \d|A unified platform)")


async def look(xray: Executable, *arguments: str, stdin: bytes) -> Done:
    """Run a checking command with a configuration on stdin. Raises as `starting.judge`."""
    done = await xray.run(*arguments, stdin=stdin)
    starting.judge(done, _VERDICT, cause)
    return done


def is_refusal(core: CoreProcess) -> bool:
    """Whether a core exited because its configuration is invalid."""
    return core.exit is not None and core.exit.code == REFUSED


def cause(lines: Sequence[str]) -> str:
    """The core's last line about its failure, without lines of progress."""
    relevant = [line for line in lines if line.strip() and not _CHATTER.match(line)]
    return starting.last(relevant)
