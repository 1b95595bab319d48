"""Find a child process's sockets quickly, by a cache of their descriptor numbers. Linux only, blocking.

A duplicate refers to the same socket. None is ever kept: while one exists, the child's close does not reach its peer.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from drivers.sockets.pidfd import Unreachable, getfd, has_exited

_FILES = "/proc/{}/fd"
_SOCKET = "socket:["


class Descriptors:
    """The socket descriptors of one process, by the inodes that the kernel's lists of connections have."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # Descriptor numbers by inode; a number may have another socket by now.
        self._numbers: dict[int, int] = {}

    def taken(self, inodes: Collection[int]) -> Iterator[tuple[int, int]]:
        """Each of these sockets with a duplicate of it, which is open until the next one.

        Closed sockets are left out. Raises `Unreachable`.
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
            if not has_exited(process):
                raise Unreachable(error) from error
        finally:
            os.close(process)

    def _each(self, process: int, inodes: Collection[int], missed: list[int]) -> Iterator[tuple[int, int]]:
        """As `taken`; inodes whose number has another socket by now go to `missed`."""
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
        """Read all numbers again: those of closed sockets are reused."""
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
        # In one assignment, since several threads may read it.
        self._numbers = numbers


def _duplicate(process: int, number: int) -> int | None:
    """Duplicate a descriptor of the process; None if the number is not in use."""
    try:
        return getfd(process, number)
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise
