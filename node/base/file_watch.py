"""Files that an operator may replace while the node runs: checked periodically, and reloaded when they changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

from twisted.internet.interfaces import IReactorTime

from node.base.logs import Logger
from node.base.part import Part
from node.base.periodic import Periodic

Stamp = tuple[tuple[int, ...] | None, ...]


class Files(ABC):
    """Something that is loaded from files, and reloaded when they change. If that fails, the previous one stays in use.

    `what` begins the error: "the previous certificate stays in use". `unfit` is the exception that `make` raises for
    files that it cannot use.
    """

    log = Logger()

    def __init__(
        self,
        files: Iterable[Path],
        what: str,
        unfit: type[Exception],
        reloaded: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`reloaded` is called after each reload with its fault, empty if it succeeded."""
        self._files = tuple(files)
        self._what = what
        self._unfit = unfit
        self._seen: Stamp | None = None
        # Why the current files are not in use; empty if they are.
        self.fault = ""
        self._reloaded = reloaded

    @property
    def warnings(self) -> list[str]:
        """Why the files in use are not the current ones."""
        return [self.fault] if self.fault else []

    @abstractmethod
    def make(self) -> None:
        """Read the files and put them in use."""

    def load(self) -> None:
        """Call `make`, and note the files, so that `changed` is false until they change. Raises what `make` raises."""
        seen = stamp(self._files)  # before reading, so that a change in between is noticed later
        try:
            self.make()
        except self._unfit:
            self._seen = seen
            raise
        # After any other exception the files count as changed, and the next look loads them again.
        self._seen, self.fault = seen, ""

    def reload(self) -> bool:
        """Load the files again. Returns False, after one error in the log, if that fails."""
        try:
            self.load()
        except self._unfit as error:
            self.fault = f"{self._what}: {error}"
            self.log.error("{fault}", fault=self.fault)
        self._reloaded(self.fault)
        return not self.fault

    def changed(self) -> bool:
        """Return whether the files changed since the last attempt to load them, successful or not."""
        return stamp(self._files) != self._seen


class FileWatch(Part):
    """Checks files every `interval` seconds, and reloads them when they changed. `what` completes "looking for …"."""

    def __init__(self, what: str, files: Files, reactor: IReactorTime, interval: float = 10) -> None:
        self.files = files
        self.title = f"the watch for {what}"
        self._looking = Periodic(f"looking for {what}", self._look, interval, reactor)

    @property
    def warnings(self) -> list[str]:
        """Why the files in use are not the current ones, and whether looking for changes fails."""
        return [*self.files.warnings, *self._looking.warnings]

    def start(self) -> None:
        """Load the files. Raises what their `make` raises."""
        self.files.load()
        self._looking.start()

    def stop(self) -> None:
        self._looking.stop()

    def _look(self) -> None:
        if self.files.changed():
            self.files.reload()


def stamp(files: Iterable[Path]) -> Stamp:
    """Return a value that changes when one of the files does."""
    return tuple(map(_stamp_of, files))


def _stamp_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None  # reading the file will raise the reason
    # ctime changes with a chmod that made the file readable.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
