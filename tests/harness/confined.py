"""Run a command without capabilities, and with some system calls refused.

`python confined.py '{"refused": [[[0, 438]]], "error": 1}' COMMAND ARGUMENTS...` executes the command, which can gain
no privileges (no_new_privs), as under systemd's NoNewPrivileges.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import socket
import struct
import sys
from collections.abc import Collection, Sequence

# Numbers of system calls: x86-64 has its own (arch/x86/entry/syscalls/syscall_64.tbl), but for the newest.
_OWN = platform.machine() == "x86_64"
_SOCKET, _SETSOCKOPT, _FCNTL = (41, 54, 72) if _OWN else (198, 208, 25)
# What a filter reads: places in `struct seccomp_data`, of the number and of the low halves of arguments.
_NUMBER, _FIRST, _SECOND, _THIRD = 0, *(range(16, 40, 8) if sys.byteorder == "little" else range(20, 44, 8))
# Calls that can be refused: the values that they have in these places.
CALLS = {
    "pidfd_open": [(_NUMBER, 434)],
    "pidfd_getfd": [(_NUMBER, 438)],
    "landlock_create_ruleset": [(_NUMBER, 444)],
    "sock_diag": [(_NUMBER, _SOCKET), (_FIRST, socket.AF_NETLINK), (_THIRD, 4)],
    "F_SETPIPE_SZ": [(_NUMBER, _FCNTL), (_SECOND, fcntl.F_SETPIPE_SZ)],
    "SO_MAX_PACING_RATE": [(_NUMBER, _SETSOCKOPT), (_SECOND, socket.SOL_SOCKET), (_THIRD, 47)],
    "SO_ATTACH_REUSEPORT_CBPF": [(_NUMBER, _SETSOCKOPT), (_SECOND, socket.SOL_SOCKET), (_THIRD, 51)],
    "SO_BINDTOIFINDEX": [(_NUMBER, _SETSOCKOPT), (_SECOND, socket.SOL_SOCKET), (_THIRD, 62)],
    "IP_MINTTL": [(_NUMBER, _SETSOCKOPT), (_SECOND, socket.IPPROTO_IP), (_THIRD, 21)],
}
# prctl(2) and seccomp(2); bpf: load a value of the call, compare, return.
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 24, 38, 2
_LOAD, _GO_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOWED, _REFUSED = 0x7FFF0000, 0x00050000
_CAPABILITIES = 64
_LIBC = ctypes.CDLL(None, use_errno=True)


def argv(refused: Collection[str] = (), error: int = errno.EPERM) -> list[str]:
    """A command prefix: the command has no capabilities, and these system calls fail with this error."""
    return [sys.executable, __file__, json.dumps({"refused": [CALLS[name] for name in refused], "error": error})]


def _main(what: str, command: Sequence[str]) -> None:
    given = json.loads(what)
    if os.geteuid() == 0:
        # Even root does not gain by execve what the bounding set lacks.
        for capability in range(_CAPABILITIES):
            _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
    _refuse(given["refused"], given["error"])
    os.execv(command[0], [*command])


def _refuse(calls: Sequence[Sequence[tuple[int, int]]], error: int) -> None:
    steps = []
    for call in calls:
        for number, (place, value) in enumerate(call):
            # To the next call, over the rest of this one.
            steps += [(_LOAD, 0, 0, place), (_GO_IF_EQUAL, 0, 2 * (len(call) - number) - 1, value)]
        steps.append((_RETURN, 0, 0, _REFUSED | error))
    steps.append((_RETURN, 0, 0, _ALLOWED))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    _prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program))


def _prctl(option: int, first: int, second: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "prctl")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
