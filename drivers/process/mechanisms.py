"""What the node needs of the kernel without privileges, each tried once on sockets of its own. Linux only, blocking.

A mechanism may be refused by an old kernel, a filter of system calls, a security module or a limit of the machine. All
tries together take some milliseconds. The table in docs/install.md is made from this one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from drivers.install import leash
from drivers.process.child import PIPE, USUAL_PIPE, widen
from drivers.process.confinement import UNCONFINED
from drivers.sockets import pidfd, sock_diag
from drivers.sockets.held import Unsteerable
from drivers.sockets.pacing import narrow, pace
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.reuseport import address_of, deafen, pick, pick_by_hash
from drivers.sockets.sessions import hide, show
from drivers.sockets.steering import Group, Member, crowd

_PR_GET_PDEATHSIG = 2
# Any values: bytes a second, and of a window.
_RATE, _WINDOW = 1_000_000, 65_536


class Mechanism(NamedTuple):
    """`attempt` raises `OSError`, `Unreachable` or `Unsteerable` if the kernel refuses it; `lost` follows for users.

    `linux`: the first version that has it for all users. `needs`: what else must allow it.
    """

    name: str
    linux: str
    needs: str
    lost: str
    attempt: Callable[[], object]


def refused() -> list[str]:
    """Try each mechanism. Returns a line for each that the kernel refuses: its name, what follows, and why."""
    return [f"{one.name}, so {one.lost}: {why}" for one in MECHANISMS if (why := _refusal(one.attempt))]


def _refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    except (Unreachable, Unsteerable) as error:
        return str(error)
    return ""


def _hold_a_process() -> None:
    own = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(own, 0)
    finally:
        os.close(own)


@contextmanager
def _bound(kind: socket.SocketKind) -> Iterator[socket.socket]:
    """A socket that others could join."""
    with socket.socket(socket.AF_INET, kind) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("127.0.0.1", 0))
        yield one


def _steer() -> None:
    with _bound(socket.SOCK_STREAM) as listener:
        listener.listen()
        Group(address_of(listener), [Member(0, listener, 0)]).begin()
        pick_by_hash(listener)
        deafen(listener)


def _move_sessions() -> None:
    with _bound(socket.SOCK_DGRAM) as one:
        crowd(one)
        pick(one, 0)
        hide(one)
        show(one, 0)


def _list_connections() -> None:
    sock_diag.listeners([range(1, 2)])


def _pace() -> None:
    with socket.socket() as one:
        pace(one, _RATE)
        narrow(one, _WINDOW)


def _confine() -> None:
    if not leash.version():
        raise OSError(errno.ENOSYS, "the kernel lacks it, or a filter of system calls forbids it")


def _follow_the_parent() -> None:
    """It is of this thread alone; set to what it is."""
    libc, number = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    for arguments in ((_PR_GET_PDEATHSIG, ctypes.byref(number)), (leash.PR_SET_PDEATHSIG, number)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _widen() -> None:
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        widen(ends[0])
        if (size := fcntl.fcntl(ends[0], fcntl.F_GETPIPE_SZ)) <= USUAL_PIPE:
            raise OSError(errno.EPERM, f"a pipe has {size // 1024} KiB, not {PIPE // 1024}")
    finally:
        for end in ends:
            os.close(end)


_RESTARTS = "a changed configuration restarts the core and ends all connections"

MECHANISMS = (
    Mechanism(
        "duplicates of a core's sockets (pidfd_getfd)",
        "5.6",
        "Docker: `SYS_PTRACE` or another seccomp profile; `kernel.yama.ptrace_scope` 0 or 1",
        f"{_RESTARTS}, users of Xray who are removed or have too many addresses keep their connections, and speed "
        "limits are not enforced",
        pidfd.check,
    ),
    Mechanism(
        "holding a process (pidfd_open, pidfd_send_signal)",
        "5.3",
        "Docker 20.10.1 or later, or another seccomp profile",
        "cores cannot be started and ended (with KEEPER=off they can, but end with the node)",
        _hold_a_process,
    ),
    Mechanism(
        "steering of new connections (SO_ATTACH_REUSEPORT_CBPF, IP_MINTTL)",
        "5.3",
        "packets from 127.84.88.78 to the machine's own addresses",
        _RESTARTS,
        _steer,
    ),
    Mechanism(
        "hiding of UDP sockets (SO_BINDTOIFINDEX)",
        "5.7",
        "`/proc/net/udp`",
        f"{_RESTARTS} if it has inbounds over UDP",
        _move_sessions,
    ),
    Mechanism(
        "the list of connections (sock_diag)",
        "4.2",
        "`CONFIG_INET_DIAG` (module `tcp_diag`), sockets of `AF_NETLINK`",
        "limits of speeds and addresses are not enforced, and an inbound that stops accepting is not noticed",
        _list_connections,
    ),
    Mechanism(
        "pacing of sockets (SO_MAX_PACING_RATE)",
        "4.13",
        "",
        "speed limits are not enforced",
        _pace,
    ),
    Mechanism(
        "Landlock (landlock_create_ruleset)",
        "5.13 (6.7 for ports, 6.12 for signals)",
        "`landlock` in the kernel's list of security modules (`lsm=`)",
        UNCONFINED,
        _confine,
    ),
    Mechanism(
        "the end with the parent (PR_SET_PDEATHSIG)",
        "2.6",
        "",
        "cores go on alone when the keeper is killed, until the next start of the node ends them",
        _follow_the_parent,
    ),
    Mechanism(
        "larger pipes (F_SETPIPE_SZ)",
        "2.6.35",
        "`fs.pipe-max-size` and `fs.pipe-user-pages-soft`",
        "while the node is busy Xray drops log lines, and sing-box delays new connections",
        _widen,
    ),
)
