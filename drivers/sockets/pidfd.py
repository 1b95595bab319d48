"""Duplicate descriptors of another process with pidfd_getfd(2), and explain to an operator why that fails.

It needs Linux 5.6 and no capability if the other process has the same user and may be traced. A seccomp filter may
forbid the call, and some processes may not be traced.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select

# The same number on every architecture (include/uapi/asm-generic/unistd.h).
_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)
# Milliseconds to wait for the end of a process.
_MOMENT = 20


class Unreachable(Exception):
    """The kernel refuses access to a child's sockets. The text says why, and what the operator has to allow."""

    def __init__(self, fault: OSError) -> None:
        super().__init__(f"{_reason(fault)} ({fault})")


# Refusals: by seccomp, by the rules of ptrace, by hidepid, or because the kernel is too old.
_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENOSYS)
_FORBIDDEN = (
    "the node may not call pidfd_open and pidfd_getfd, which it needs to reach the core's sockets: allow them (in a "
    "container with the capability SYS_PTRACE or a seccomp profile that has them; under systemd with SystemCallFilter)"
)
_WITHOUT = "the node cannot reach the core's sockets"
_UNTRACED = (
    "the node may not trace the core, so it cannot reach its sockets: the core's executable must be readable by the "
    "node's user (mode 0755) and have no capabilities of its own, and kernel.yama.ptrace_scope must be 0 or 1"
)


def getfd(process: int, descriptor: int) -> int:
    """Duplicate a descriptor of the process with this pidfd. Raises `OSError`."""
    found: int = _LIBC.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if found < 0:
        fault = ctypes.get_errno()
        raise OSError(fault, os.strerror(fault), "pidfd_getfd")
    return found


def has_exited(process: int) -> bool:
    """Whether the process of a pidfd has exited, or does within `_MOMENT`: the kernel refuses access then, too."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(_MOMENT))


def _reason(fault: OSError) -> str:
    if fault.errno not in _REFUSALS:
        return _WITHOUT
    return _UNTRACED if _may_call() else _FORBIDDEN


def _may_call() -> bool:
    """Whether the system calls are allowed, tried on this process, which may always trace itself."""
    try:
        own = os.pidfd_open(os.getpid())
    except OSError:
        return False
    try:
        os.close(getfd(own, own))
    except OSError:
        return False
    finally:
        os.close(own)
    return True
