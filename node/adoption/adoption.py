"""A node that goes on with the core of one that was killed, and may itself be: see docs/adopt.md."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.protocol import ProcessProtocol

from node.adoption import guard, standing
from node.logs import Logger
from node.secret_file import clear, write_secret
from protos.handover_pb2 import Handover


class Adoption:
    """`directory` is for what the next node and the guard read; `mark` is what cores have in their environment.

    `sweep` ends those that nobody went on with. Without `on` there is none of it.
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
        """It is this node that runs from now on. Returns what an earlier one left. Raises `OSError`."""
        if not self._on:
            # No guard ends what this one runs.
            shutil.rmtree(self._directory, ignore_errors=True)
            return None
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in standing.NAMES:
            clear(self._directory / name)
        left = standing.read(self._directory)
        self._name()
        return left

    def _name(self) -> None:
        """Tell guards which node to look at. Raises `OSError`."""
        pid, file = os.getpid(), self._directory / guard.NODE
        try:
            write_secret(file, f"{pid} {guard.began(pid)}".encode())
        except OSError as error:
            # On a full disk the node comes up all the same, and no guard takes it for the dead one.
            file.unlink(missing_ok=True)
            self.log.error(
                "if this node is killed, nobody ends cores that no other node goes on with: {error}", error=str(error)
            )

    def protect(self) -> None:
        """Have cores ended that nobody comes back for, from now on."""
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
        """The node ends in order: no core is left, and nobody is to look for any."""
        if self._on:
            self._sweep()
            shutil.rmtree(self._directory, ignore_errors=True)


class _Guard(ProcessProtocol):
    """It leaves at once, and lives on by itself."""
