"""Adoption: a node takes over the core of a killed node, and prepares for being killed itself. See docs/adopt.md."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.protocol import ProcessProtocol

from node.adoption import guard, handover_files
from node.logs import Logger
from node.secret_file import clear, write_secret
from protos.handover_pb2 import Handover


class Adoption:
    """The hand-over files and the guard of this node; does nothing without `on`.

    `directory` has the files for the next node and the guard; `mark` returns the mark in the cores' environment;
    `sweep` kills cores that were not adopted.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        directory: Path,
        on: bool,
        seconds: float,
        mark: Callable[[], str],
        sweep: Callable[[], object],
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._on = on
        self._seconds = seconds
        self._mark = mark
        self._sweep = sweep

    def begin(self) -> Handover | None:
        """Register this node as the running one. Returns what a killed node left. Raises `OSError`."""
        if not self._on:
            # A guard of an earlier node ends without the directory, and leaves this node's cores alone.
            shutil.rmtree(self._directory, ignore_errors=True)
            return None
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in handover_files.NAMES:
            clear(self._directory / name)
        left = handover_files.read(self._directory)
        self._name()
        return left

    def _name(self) -> None:
        """Write the file that tells guards which node to watch. Raises `OSError`."""
        pid, file = os.getpid(), self._directory / guard.NODE
        try:
            write_secret(file, f"{pid} {guard.began(pid)}".encode())
        except OSError as error:
            # On a full disk the node still comes up; without the file no guard takes it for the dead one.
            file.unlink(missing_ok=True)
            self.log.error(
                "the node is not guarded: if it is killed and no other node adopts its cores, they run on until "
                "somebody ends them: {error}",
                error=str(error),
            )

    def protect(self) -> None:
        """Start the guard, which kills the cores if this node dies and no other node comes."""
        if self._on:
            script = [
                sys.executable,
                "-I",
                "-S",
                guard.__file__,
                str(self._directory),
                self._mark(),
                str(self._seconds),
            ]
            self._reactor.spawnProcess(_Guard(), script[0], script, env={}, childFDs={})

    def end(self) -> None:
        """Clean up at an orderly end: kill remaining cores and delete the hand-over files."""
        if self._on:
            self._sweep()
            shutil.rmtree(self._directory, ignore_errors=True)


class _Guard(ProcessProtocol):
    """The guard's process: it forks at once and lives on detached."""
