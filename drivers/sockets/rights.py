"""Whether the kernel lets this process have a duplicate of another's descriptor, and what to allow where it does not.

It takes no capability: the other one is the same user, and whoever may trace it may have one (pidfd_getfd(2), since
Linux 5.6). A filter of system calls may forbid the call, and there are processes that may not be traced.
"""

from __future__ import annotations

import ctypes
import os
import select

# The same number on every architecture (include/uapi/asm-generic/unistd.h).
_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)
# Milliseconds that the end of a process may take.
_MOMENT = 20


class Unreachable(Exception):
    """The kernel does not let us at a child's sockets; the text tells the operator why, and what to allow."""

    def __init__(self, fault: OSError) -> None:
        super().__init__(f"{_UNTRACED if _may_call() else _FORBIDDEN} ({fault})")


_FORBIDDEN = (
    "the node may not call pidfd_open and pidfd_getfd, by which it has the core's sockets: allow them (in a container "
    "by the capability SYS_PTRACE, or by a seccomp profile with them; under systemd by SystemCallFilter)"
)
_UNTRACED = (
    "the node may not trace the core, and so does not have its sockets: the core's executable must be readable by the "
    "node's user (mode 0755) and have no capabilities of its own, and kernel.yama.ptrace_scope must be 0 or 1"
)


def take(process: int, descriptor: int) -> int:
    """Our descriptor for one of a process's, which is given by a pidfd. Raises `OSError`."""
    found: int = _LIBC.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if found < 0:
        fault = ctypes.get_errno()
        raise OSError(fault, os.strerror(fault), "pidfd_getfd")
    return found


def ends(process: int) -> bool:
    """Whether the process of a pidfd has ended or is about to: then, too, the kernel refuses what it allowed before."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(_MOMENT))


def _may_call() -> bool:
    """Whether the calls are allowed at all: everybody may trace themselves."""
    try:
        own = os.pidfd_open(os.getpid())
    except OSError:
        return False
    try:
        os.close(take(own, own))
    except OSError:
        return False
    finally:
        os.close(own)
    return True
