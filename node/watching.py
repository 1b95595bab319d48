"""Files that an operator replaces while the node runs: looked at again and again, and loaded when they changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

from twisted.application.service import Service
from twisted.internet.interfaces import IReactorTime

from node.logs import Logger
from node.periodic import Periodic

Stamp = tuple[tuple[int, ...] | None, ...]


class Files(ABC):
    """What is made of some files, anew when they changed. Where that cannot be, what was made of them before stays.

    `what` is how that is said: "the certificate that was loaded before stays". `unfit` is what `make` raises for files
    that it cannot use.
    """

    log = Logger()

    def __init__(self, files: Iterable[Path], what: str, unfit: type[Exception]) -> None:
        self._files = tuple(files)
        self._what = what
        self._unfit = unfit
        self._seen: Stamp | None = None
        # Why the files as they are now are not what is in use.
        self.fault = ""
        # Told after each attempt to load them anew, with what kept them from it, if anything did.
        self.reloaded: Callable[[str], None] = lambda _: None

    @abstractmethod
    def make(self) -> None:
        """Read the files, now to be used."""

    def load(self) -> None:
        """The same, and they are not looked at again before they change. Raises what `make` raises."""
        seen = stamp(self._files)  # before reading, so that a change in between is noticed later
        try:
            self.make()
        except self._unfit:
            self._seen = seen
            raise
        # After anything else they are looked at again the next time.
        self._seen, self.fault = seen, ""

    def reload(self) -> bool:
        """Load them again; False, and one error in the log, if that cannot be."""
        try:
            self.load()
        except self._unfit as error:
            self.fault = f"{self._what} in use: {error}"
            self.log.error("{fault}", fault=self.fault)
        self.reloaded(self.fault)
        return not self.fault

    def changed(self) -> bool:
        """Whether they are others than at the last attempt to load them, be they as bad as they may."""
        return stamp(self._files) != self._seen


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
