"""Programs that check manifests, from PyPI and Go modules, in a separate directory.

TXNODE_TEST_TOOLS is a directory that keeps them for later runs; without it each run takes some minutes to make them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

# Timeout in seconds of a test that may have to make them.
MAKING = 1800


@dataclass(frozen=True)
class Tools:
    """The directory of the programs; each is made on first use."""

    directory: Path

    def python(self, name: str, *requirements: str, interpreter: str = sys.executable) -> Path:
        """The `bin` of a virtual environment with these packages."""
        place = self.directory / name
        if not (place / "complete").exists():
            run([interpreter, "-m", "venv", "--clear", place])
            run([place / "bin" / "pip", "install", "--quiet", *requirements])
            (place / "complete").touch()
        return place / "bin"

    def go(self, name: str, package: str) -> Path:
        """A program from a Go package with its version. Needs Go."""
        program = self.directory / "go" / name
        if not program.exists():
            run(["go", "install", package], GOBIN=str(program.parent))
        return program

    def go_program(self, name: str, text: str, *steps: Sequence[str]) -> Path:
        """Build a Go program from source; `steps` are `go` commands that set up its module."""
        place = self.directory / "go" / f"{name}-module"
        program = place / name
        if not program.exists():
            place.mkdir(parents=True, exist_ok=True)
            (place / "main.go").write_text(text)
            (place / "go.mod").write_text(f"module {name}\n")
            for step in (*steps, ("mod", "tidy"), ("build", "-o", name)):
                run(["go", *step], place)
        return program


@contextmanager
def tools() -> Iterator[Tools]:
    if kept := os.environ.get("TXNODE_TEST_TOOLS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield Tools(Path(kept))
    else:
        with TemporaryDirectory(prefix="txnode-tools-", dir="/var/tmp") as directory:
            yield Tools(Path(directory))


def run(command: Sequence[str | Path], directory: Path | None = None, **environment: str) -> str:
    """Run a command. Returns stdout and stderr; raises `AssertionError` with them if it fails."""
    done = subprocess.run(
        command,
        cwd=directory or "/",
        env={**_outside(), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def _outside() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
