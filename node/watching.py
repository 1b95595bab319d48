"""Files that an operator replaces while the node runs: looked at again and again, and loaded when they changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from twisted.application.service import Service
from twisted.internet.interfaces import IReactorTime

from node.periodic import Periodic

Stamp = tuple[tuple[int, ...] | None, ...]


class Files(Protocol):
    """What is made of some files. `fault`: why the files as they are now are not what is in use."""

    fault: str

    def changed(self) -> bool:
        """Whether they are others than at the last attempt to load them."""
        ...

    def reload(self) -> bool:
        """Load them; False, and one error in the log, if that cannot be: what was loaded before stays."""
        ...


class FileWatch(Service):
    """Looks at files every `interval` seconds and loads them when they changed. `what` completes "looking for …"."""

    def __init__(self, what: str, files: Files, reactor: IReactorTime, interval: float = 10) -> None:
        self._files = files
        self._looking = Periodic(f"looking for {what}", self._look, interval, reactor)

    @property
    def warnings(self) -> list[str]:
        """Whether a change may go unnoticed."""
        return [text for text in (self._files.fault, *self._looking.warnings) if text]

    def startService(self) -> None:
        super().startService()
        self._looking.start()

    def stopService(self) -> None:
        super().stopService()
        self._looking.stop()

    def _look(self) -> None:
        if self._files.changed():
            self._files.reload()


def stamp(files: Iterable[Path]) -> Stamp:
    """What is another one when one of the files is."""
    return tuple(map(_stamp_of, files))


def _stamp_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None  # reading it will say why
    # ctime tells of a chmod that made the file readable.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
