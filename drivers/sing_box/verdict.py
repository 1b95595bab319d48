"""Parse sing-box's verdict on a configuration, from a check or a failed start."""

from __future__ import annotations

import re
from collections.abc import Sequence

from drivers.process import readiness as starting
from drivers.process.child import CoreProcess
from drivers.process.executable import Executable
from node.contract.driver import Done

STDIN = ("-c", "stdin", "--disable-color")
_FATAL = re.compile(r"FATAL\[\d+\] (.*)")
# How the errors begin that blame the configuration, during a check or a start (`cmd/sing-box/cmd_run.go`), …
# (Groups of outbounds do not depend on the machine.)
_GROUP = r"start service: start outbound(?:: start endpoint)?/(?:selector|urltest)\["
_AT_FAULT = re.compile(rf"decode config|create service:|{_GROUP}|.* not found")
# … and words in such errors that blame the machine all the same.
_PASSING = ("address already in use", "cannot assign requested address", "permission denied")


async def look(core: Executable, *arguments: str, stdin: bytes, output: int = 3) -> Done:
    """Run the core on a configuration. Raises as `starting.judge`."""
    done = await core.run(*arguments, *STDIN, stdin=stdin, output=output)
    starting.judge(done, _FATAL, cause)
    return done


def is_refusal(core: CoreProcess) -> bool:
    """Whether a core that exited refused its configuration.

    The exit code is 1 for any cause, such as a rule set that could not be fetched, so its last lines decide.
    """
    said = cause(core.last_lines)
    at_fault = _AT_FAULT.match(said) and not any(words in said for words in _PASSING)
    return core.exit is not None and core.exit.code == 1 and bool(at_fault)


def cause(lines: Sequence[str]) -> str:
    """Return why the core ended, from its last lines."""
    fatal = [match[1] for line in lines if (match := _FATAL.search(line))]
    return starting.last(fatal or [line for line in lines if line.strip()])
