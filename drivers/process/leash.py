"""A core that cannot outlive the node: the kernel is asked for SIGKILL at the parent's death, then the core executed.

posix_spawn, the only way to spawn while gRPC's threads run, has no hook for this, so another program stands before the
core: setpriv(1) where there is one that can, else this file as a script: `python -I -S leash.py PARENT_PID EXECUTABLE
ARGUMENTS...`. PR_SET_PDEATHSIG is kept over execve (prctl(2)) unless the file has capabilities, and is sent when the
*thread* that spawned ends; what slips through is swept at the node's next start.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
# The module `signal` takes 4 ms to import.
SIGKILL = 9
# The exit codes of setpriv, and of this script, for a command that cannot be run.
MISSING = 127
UNFIT = 126


def leashed(command: list[str], setpriv: str | None = None) -> list[str]:
    """The same command, ended by the kernel when the thread that spawns it ends."""
    if setpriv is not None:
        return [setpriv, "--pdeathsig", "KILL", "--", *command]
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL) != 0:
        sys.stderr.write(f"cannot ask for a parent-death signal: {os.strerror(ctypes.get_errno())}\n")
    # The parent may have died before the kernel was asked.
    if os.getppid() != parent:
        raise SystemExit("the node is gone already")
    try:
        os.execv(command[0], command)  # noqa: S606 - this is what the script is for
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        raise SystemExit(MISSING if isinstance(error, FileNotFoundError) else UNFIT) from error


if __name__ == "__main__":
    main(sys.argv[1:])
