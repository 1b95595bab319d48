"""What comes in a wheel on PyPI: fetched by the caller's own pip settings, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from drivers.install.releases import Unavailable

LIMIT = 1800.0
"""Seconds that one command may take; a build, the longest of them, takes about a minute on two cores."""


def install(requirement: str, work: Path, environ: Mapping[str, str]) -> Path:
    """Install this alone below `work`; the environment that it is in. Raises Unavailable if it cannot be had."""
    home = _environment(work, environ)
    run([*_pip(home), "install", "--quiet", "--no-deps", "--only-binary=:all:", requirement], environ)
    return home


def download(requirement: str, work: Path, environ: Mapping[str, str]) -> Path:
    """Fetch the wheel itself to `work`. Raises Unavailable if it cannot be had."""
    into = work / "wheel"
    pip = _pip(_environment(work, environ))
    run([*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", into, requirement], environ)
    return next(into.iterdir())


def _environment(work: Path, environ: Mapping[str, str]) -> Path:
    home = work / "venv"
    run([sys.executable, "-Im", "venv", home], environ)
    return home


def _pip(home: Path) -> list[str | Path]:
    return [home / "bin" / "python", "-Im", "pip", "--disable-pip-version-check", "--no-cache-dir"]


def run(command: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    """What `command` prints. Raises Unavailable with its last words if it fails, or takes longer than LIMIT."""
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
        words = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise Unavailable(f"{name} failed with exit code {done.returncode}: {words}")
    return done.stdout
