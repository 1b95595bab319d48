"""The numbers by which a child process has its sockets, so that one of many is found at once. Linux only, blocking.

A duplicate of such a socket is the very socket. None is ever kept: as long as somebody else has one the child's close
tells its peer nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from drivers.sockets.rights import Unreachable, ends, take

_FILES = "/proc/{}/fd"
_SOCKET = "socket:["


class Descriptors:
    """Those of one process. Sockets are named by their inodes, which the kernel's lists of connections have."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # By inode; the socket at a number may be another one by now.
        self._numbers: dict[int, int] = {}

    def taken(self, inodes: Collection[int]) -> Iterator[tuple[int, int]]:
        """Each of these sockets with a duplicate of it, which is open until the next is asked for.

        Those that are closed by now are left out. Raises `Unreachable`.
        """
        with self._process() as process:
            if not inodes or process is None:
                return
            fresh = not self._numbers.keys() >= {*inodes}
            if fresh:
                self._look()
            missed: list[int] = []
            yield from self._each(process, inodes, missed)
            if missed and not fresh:
                self._look()
                yield from self._each(process, missed, [])

    @contextmanager
    def _process(self) -> Iterator[int | None]:
        try:
            process = os.pidfd_open(self._pid)
        except ProcessLookupError:
            yield None
            return
        except OSError as error:
            raise Unreachable(error) from error
        try:
            yield process
        except OSError as error:
            if not ends(process):
                raise Unreachable(error) from error
        finally:
            os.close(process)

    def _each(self, process: int, inodes: Collection[int], missed: list[int]) -> Iterator[tuple[int, int]]:
        """Those whose number is of another socket by now go to `missed`."""
        for inode in inodes:
            number = self._numbers.get(inode)
            duplicate = None if number is None else _duplicate(process, number)
            try:
                if duplicate is not None and os.fstat(duplicate).st_ino == inode:
                    yield inode, duplicate
                elif number is not None:
                    missed.append(inode)
            finally:
                if duplicate is not None:
                    os.close(duplicate)

    def _look(self) -> None:
        """Find all numbers anew: those of closed sockets are given to the next ones."""
        numbers: dict[int, int] = {}
        names = os.open(_FILES.format(self._pid), os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in os.listdir(names):  # noqa: PTH208 - of a descriptor
                with suppress(FileNotFoundError):
                    target = os.readlink(name, dir_fd=names)
                    if target.startswith(_SOCKET):
                        numbers[int(target[len(_SOCKET) : -1])] = int(name)
        finally:
            os.close(names)
        # At once, since several threads may look.
        self._numbers = numbers


def _duplicate(process: int, number: int) -> int | None:
    """Our descriptor for the process's; None if it has none of this number."""
    try:
        return take(process, number)
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise
