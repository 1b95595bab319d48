"""`nodectl sandbox` as a process: a node without a core, whose core's behaviour is ordered line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts.staging.process import tied

ROOT = Path(__file__).parents[2]
# Seconds until it has ended.
_STOP = 20


class Sandbox:
    """A target for controllers, inside its `with` block."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._argv = [sys.executable, "-m", "node.nodectl", "sandbox", "--json", *options]
        self._directory = directory

    def __enter__(self) -> Self:
        environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "TMPDIR": str(self._directory)}
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = tied(self._argv, cwd=self._directory, env=environment, text=True, **streams)
        place = json.loads(self._line())
        self.host, self.rest_port, self.grpc_port = place["address"], place["rest_port"], place["grpc_port"]
        self.key, self.certificate = place["key"], Path(place["certificate"])
        self.pem = self.certificate.read_text()
        return self

    def order(self, line: str) -> str:
        """Give an order, and return its answer."""
        print(line, file=self._process.stdin, flush=True)
        return self._line()

    def hang_up(self) -> int:
        """Close its standard input, and return its exit status."""
        assert self._process.stdin
        self._process.stdin.close()
        return self._process.wait(_STOP)

    def _line(self) -> str:
        assert self._process.stdout
        return str(self._process.stdout.readline()).strip()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        with self._process:
            self.status = self._process.wait(_STOP)
