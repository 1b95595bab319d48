"""Fetch wheels from PyPI with the caller's own pip settings, outside of our environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from drivers.install.releases import Unavailable

# Seconds that one command may take; a build of `scripts.cores`, the longest, takes about a minute on two cores.
_LIMIT = 1800.0
# Options of pip for one wheel alone.
ALONE = ("--quiet", "--no-deps", "--only-binary=:all:")


def download(requirement: str, work: Path, environ: Mapping[str, str]) -> Path:
    """Download the wheel to `work`. Raises Unavailable."""
    into = work / "wheel"
    run([*pip(work, environ), "download", *ALONE, "--dest", into, requirement], environ)
    return next(into.iterdir())


def pip(work: Path, environ: Mapping[str, str]) -> list[str | Path]:
    """Return the command of our environment's pip; if it has none, of a new environment below `work`."""
    python: str | Path = sys.executable
    if find_spec("pip") is None:
        python = work / "venv" / "bin" / "python"
        run([sys.executable, "-Im", "venv", work / "venv"], environ)
    return [python, "-Pm", "pip", "--disable-pip-version-check", "--no-cache-dir"]


def run(command: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    """Return the output of `command`. Raises Unavailable, with its last lines, if it fails or takes too long."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{name}: {error}") from error
    if done.returncode != 0:
        lines = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise Unavailable(f"{name} failed with exit code {done.returncode}: {lines}")
    return done.stdout
