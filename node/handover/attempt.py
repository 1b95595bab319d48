"""Runs the next version of the node: if it cannot come up, it reports why to the keeper, which goes back to the last.

A script, `python attempt.py PROGRAM ARGUMENTS...`. It imports none of the node's own modules: they may be broken.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import traceback

# The environment variable with the socket to the keeper, and the one that the version removes when it has come up.
VARIABLE, TRYING = "TXNODE_KEEPER", "TXNODE_TRYING"
# Characters of a reason.
REASON = 2000


def main() -> None:
    keeper = socket.socket(fileno=os.dup(int(os.environ[VARIABLE].split()[0])))
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    program, script = [sys.executable, *options, *sys.argv[1:]], sys.argv[1]
    # As if the program had been executed directly: it reads its own command from here.
    sys.orig_argv, sys.argv, sys.path[0] = program, sys.argv[1:], os.path.dirname(script)  # noqa: PTH120
    os.environ[TRYING] = "yes"
    try:
        runpy.run_path(script, run_name="__main__")
        reason = "it ended before it had come up"
    except BaseException as error:
        if TRYING not in os.environ:
            raise
        reason = reason_of(error)
    if TRYING in os.environ:
        # Fit for an environment variable. The keeper ends this process, whatever threads run.
        text = reason[-REASON:].replace("\0", " ").encode("ascii", "backslashreplace").decode()
        keeper.send(json.dumps({"do": "failed", "n": 0, "reason": text}).encode())
        signal.pause()


def reason_of(error: BaseException | None) -> str:
    return f"it ended: {error}" if isinstance(error, SystemExit) else "".join(traceback.format_exception(error))


if __name__ == "__main__":
    main()
