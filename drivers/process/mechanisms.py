"""What the node needs of the kernel without privileges, each tried once on sockets of its own. Linux only, blocking.

Old kernels, filters of system calls, security modules and limits of the machine refuse some. All tries together take a
millisecond or two. The table in docs/install.md is made from this one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from drivers.process.child import PIPE, USUAL_PIPE, widen
from drivers.process.confinement import UNCONFINED, supported
from drivers.sockets import pidfd, sock_diag
from drivers.sockets.held import Unsteerable
from drivers.sockets.pacing import narrow, pace
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.reuseport import address_of, deafen, pick, pick_by_hash
from drivers.sockets.sessions import hide, show
from drivers.sockets.steering import Group, Member, crowd


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
    found = []
    for one in MECHANISMS:
        try:
            one.attempt()
        except (OSError, Unreachable, Unsteerable) as error:
            found.append(f"{one.name}, so {one.lost}: {getattr(error, 'strerror', '') or error}")
    return found


@contextmanager
def _bound(kind: socket.SocketKind) -> Iterator[socket.socket]:
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


def _pace() -> None:
    with socket.socket() as one:
        pace(one, 1_000_000)
        narrow(one, 65_536)


def _confine() -> None:
    if not supported():
        raise OSError(errno.ENOSYS, "the kernel lacks it, or a filter of system calls forbids it")


def _widen() -> None:
    out, into = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(out, "rb"), os.fdopen(into, "wb"):
        widen(out)
        if (size := fcntl.fcntl(out, fcntl.F_GETPIPE_SZ)) <= USUAL_PIPE:
            raise OSError(errno.EPERM, f"a pipe has {size // 1024} KiB, not {PIPE // 1024}")


_RESTARTS = "a changed configuration restarts the core and ends all connections"

MECHANISMS = (
    Mechanism(
        "duplicates of a core's sockets (pidfd_open, pidfd_getfd)",
        "5.6",
        "Docker: `SYS_PTRACE` or another seccomp profile; `kernel.yama.ptrace_scope` 0 or 1",
        f"{_RESTARTS}, users of Xray who are removed or have too many addresses keep their connections, and speed "
        "limits are not enforced (without pidfd_open no core starts)",
        pidfd.check,
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
        f"{_RESTARTS} if it serves UDP",
        _move_sessions,
    ),
    Mechanism(
        "the list of connections (sock_diag)",
        "4.6",
        "`CONFIG_INET_DIAG` (module `tcp_diag`), sockets of `AF_NETLINK`",
        "limits of speeds and addresses are not enforced, and an inbound that stops accepting is not noticed",
        partial(sock_diag.listeners, [range(1, 2)]),
    ),
    Mechanism("pacing of sockets (SO_MAX_PACING_RATE)", "4.13", "", "speed limits are not enforced", _pace),
    Mechanism(
        "Landlock (landlock_create_ruleset)",
        "5.13 (6.7 for ports, 6.12 for signals)",
        "`landlock` in the kernel's list of security modules (`lsm=`)",
        UNCONFINED,
        _confine,
    ),
    Mechanism(
        "larger pipes (F_SETPIPE_SZ)",
        "2.6.35",
        "`fs.pipe-max-size` and `fs.pipe-user-pages-soft`",
        "while the node is busy Xray drops log lines, and sing-box delays new connections",
        _widen,
    ),
)
