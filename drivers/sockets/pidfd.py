"""Duplicate descriptors of another process with pidfd_getfd(2), and explain to an operator why that fails.

It needs Linux 5.6 and no capability if the other process has the same user and may be traced. A seccomp filter may
forbid the call, and some processes may not be traced.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# The same number on every architecture (include/uapi/asm-generic/unistd.h).
_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)
# Milliseconds to wait for the end of a process.
_MOMENT = 20
# The descriptors of a process, and the beginning of the target of each that is a socket.
_FILES, _SOCKET = "/proc/{}/fd", "socket:["
# Yama's rule: from which value on descent is not enough, nor a capability; and the number of that, CAP_SYS_PTRACE.
_SCOPE, _DESCENT, _CAPABILITY, _PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope"), 2, 3, 19
_STATUS = Path("/proc/self/status")


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


@contextmanager
def opened(pid: int) -> Iterator[int | None]:
    """The pidfd of a process; None if it has exited. An `OSError` in the block becomes `Unreachable` while it runs."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    except OSError as error:
        raise Unreachable(error) from error
    try:
        yield process
    except OSError as error:
        if not has_exited(process):
            raise Unreachable(error) from error
    finally:
        os.close(process)


def numbers(pid: int) -> Iterator[tuple[int, int]]:
    """The inode and the descriptor's number of each socket of a process. Raises `OSError`."""
    names = os.open(_FILES.format(pid), os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in os.listdir(names):  # noqa: PTH208 - of a descriptor
            with suppress(FileNotFoundError):
                target = os.readlink(name, dir_fd=names)
                if target.startswith(_SOCKET):
                    yield int(target[len(_SOCKET) : -1]), int(name)
    finally:
        os.close(names)


def getfd(process: int, number: int) -> int | None:
    """Duplicate a descriptor of the process with this pidfd; None if the number is not in use. Raises `OSError`."""
    found: int = _LIBC.syscall(_PIDFD_GETFD, process, number, 0)
    if found >= 0:
        return found
    if (fault := ctypes.get_errno()) == errno.EBADF:
        return None
    raise OSError(fault, os.strerror(fault), "pidfd_getfd")


def has_exited(process: int) -> bool:
    """Whether the process of a pidfd has exited, or does within `_MOMENT`: the kernel refuses access then, too."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(_MOMENT))


def _reason(fault: OSError) -> str:
    if fault.errno not in _REFUSALS:
        return _WITHOUT
    return _UNTRACED if _may_call() else _FORBIDDEN


def check() -> None:
    """Check that this process may reach cores: by the calls, tried on itself, and by Yama. Raises `Unreachable`."""
    try:
        any(numbers(os.getpid()))
        _call()
        scope = int(_SCOPE.read_text()) if _SCOPE.exists() else 0
        held = int(_STATUS.read_text().split("CapEff:")[1].split()[0], 16)
        if scope >= _CAPABILITY or (scope >= _DESCENT and not held >> _PTRACE & 1):
            raise PermissionError(errno.EPERM, f"kernel.yama.ptrace_scope is {scope}")
    except OSError as error:
        raise Unreachable(error) from error


def _may_call() -> bool:
    with suppress(OSError):
        _call()
        return True
    return False


def _call() -> None:
    """Make the system calls on this process, which may always trace itself. Raises `OSError`."""
    own = os.pidfd_open(os.getpid())
    try:
        if (found := getfd(own, own)) is not None:
            os.close(found)
    finally:
        os.close(own)
