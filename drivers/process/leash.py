"""Becomes a core that cannot outlive the node: asks the kernel for SIGKILL at the parent's death, then executes it.

Run as a script: `python -I -S leash.py PARENT_PID EXECUTABLE ARGUMENTS...`. posix_spawn, the only way to spawn while
gRPC's threads run, has no hook for this. PR_SET_PDEATHSIG is kept over execve (prctl(2)) unless the file has
capabilities; what slips through is swept at the node's next start. Where setpriv(1) can do the same, it is used.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
# The module `signal` takes 4 ms to import.
SIGKILL = 9


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL) != 0:
        sys.stderr.write(f"cannot ask for a parent-death signal: {os.strerror(ctypes.get_errno())}\n")
    # The parent may have died before the kernel was asked.
    if os.getppid() != parent:
        raise SystemExit("the node is gone already")
    try:
        os.execv(command[0], command)  # noqa: S606 - this is what the script is for
    except OSError as fault:
        raise SystemExit(f"cannot run {command[0]}: {fault.strerror}") from fault


if __name__ == "__main__":
    main(sys.argv[1:])
