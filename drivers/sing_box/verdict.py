"""What sing-box says of a configuration that it looks at, or does not run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from drivers.process import readiness as starting
from drivers.process.child import CoreProcess
from drivers.process.executable import Executable
from drivers.process.spawn import Done

STDIN = ("-c", "stdin", "--disable-color")
_FATAL = re.compile(r"FATAL\[\d+\] (.*)")
# How the core says, at the latest when it starts, that a configuration is at fault (`cmd/sing-box/cmd_run.go`), …
# (Groups of outbounds have nothing of the machine's.)
_GROUP = r"start service: start outbound(?:: start endpoint)?/(?:selector|urltest)\["
_AT_FAULT = re.compile(rf"decode config|create service:|{_GROUP}|.* not found")
# … and what it says of a machine even so.
_PASSING = ("address already in use", "cannot assign requested address", "permission denied")


async def look(core: Executable, *arguments: str, stdin: bytes, output: int = 3) -> Done:
    """Have the core look at a configuration. Raises as `starting.judge`."""
    done = await core.run(*arguments, *STDIN, stdin=stdin, output=output)
    starting.judge(done, _FATAL, cause)
    return done


def is_refusal(core: CoreProcess) -> bool:
    """It ends with 1 whatever it was, a rule-set that could not be fetched among it: its words tell."""
    said = cause(core.last_lines)
    at_fault = _AT_FAULT.match(said) and not any(words in said for words in _PASSING)
    return core.exit is not None and core.exit.code == 1 and bool(at_fault)


def cause(lines: Sequence[str]) -> str:
    """What the core says of its end."""
    fatal = [match[1] for line in lines if (match := _FATAL.search(line))]
    return starting.last(fatal or [line for line in lines if line.strip()])
