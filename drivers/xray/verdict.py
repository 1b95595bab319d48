"""What Xray says of a configuration that it looks at, or does not run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from drivers.process import readiness as starting
from drivers.process.child import CoreProcess
from drivers.process.executable import Executable
from drivers.process.spawn import Done

# How it is asked for its own form of a text.
CONVERT = ("convert", "pb", "-outpbfile", "/dev/fd/3", "stdin:")
# Xray's exit code for a configuration that it does not take; a port that is taken has another.
REFUSED = 23
# How its commands begin to say that they do not take a configuration.
_VERDICT = re.compile(r"^failed to ", re.IGNORECASE)
_CHATTER = re.compile(r"^(\d{4}/\d\d/\d\d |Output ProtoBuf file|Xray \d|A unified platform)")


async def look(xray: Executable, *arguments: str, stdin: bytes) -> Done:
    """Have the core look at a configuration. Raises as `starting.judge`."""
    done = await xray.run(*arguments, stdin=stdin)
    starting.judge(done, _VERDICT, cause)
    return done


def is_refusal(core: CoreProcess) -> bool:
    """Whether a core that ended did not take its configuration."""
    return core.exit is not None and core.exit.code == REFUSED


def cause(lines: Sequence[str]) -> str:
    """What the core says last about its failure, the lines of mere progress left out."""
    telling = [line for line in lines if line.strip() and not _CHATTER.match(line)]
    return starting.last(telling)
