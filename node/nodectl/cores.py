"""The cores of this machine: which releases are known, installed and used. `drivers.install` does the work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from drivers.install.install import cores_directory, find, version_of
from drivers.install.install import install as install_core
from drivers.install.releases import CORES, Core, choose
from drivers.install.releases import InstallError as InstallError
from node.nodectl.here import Here

NAMES = tuple(CORES)
_DIRECTORY = "TXNODE_CORES"


@dataclass(frozen=True)
class Found:
    """A release; `path` where it is installed, `pinned` for the one that is installed unless another is named."""

    core: str
    release: str
    path: str
    pinned: bool
    used: bool


def directory_of(here: Here) -> Path:
    """Where the cores of this node are. Raises `InstallError`."""
    named = here.values.get(_DIRECTORY)
    return (here.directory / named).absolute() if named else cores_directory()


def variable(name: str) -> str:
    """The setting that names the executable."""
    return CORES[name][0].variable("EXECUTABLE_PATH")


def pinned(name: str) -> str:
    """The version that is installed unless another is named."""
    return CORES[name][0].version


def assets(here: Here, name: str) -> str:
    """The setting of where this core's geo files are."""
    return here.values.get(CORES[name][0].variable("ASSETS_PATH"), "")


def used(here: Here, name: str) -> tuple[Path, str] | None:
    """What a node finds that is started now, and its version. Raises `InstallError` if what it was told is no core."""
    core = CORES[name][0]
    path = find(core, here.values.get(variable(name)) or None, directory=directory_of(here))
    return (path, version_of(core, path)) if path else None


def found(here: Here) -> Iterator[Found]:
    """All releases that are known, and what is used beside them. Raises `InstallError`."""
    directory = directory_of(here)
    for name, releases in CORES.items():
        now = used(here, name)
        for core in releases:
            path = executable(core, directory)
            there = str(path) if path.exists() else ""
            yield Found(name, core.release, there, core is releases[0], now is not None and now[0] == path)
        if now and now[0] not in {executable(core, directory) for core in releases}:
            yield Found(name, now[1], str(now[0]), False, True)


def executable(core: Core, directory: Path) -> Path:
    """Where a release is once it is installed."""
    return directory / f"{core.name}-{core.release}" / core.executable


def install(here: Here, name: str, release: str | None = None, newest: bool = False) -> Path:
    """Install this release; without one any that serves, `newest` the pinned one. Tells standard error what it does.

    One that is there stays as it is. Raises `InstallError`.
    """
    core = choose(name, release)
    return install_core(core, newest or release is not None, directory_of(here))


def named(here: Here, name: str, said: str) -> Path:
    """The executable of a release that is installed, or of a path. Raises `InstallError` if it is not this core."""
    releases: Mapping[str, Core] = {core.release: core for core in CORES[name]}
    if said in releases:
        path = executable(releases[said], directory_of(here))
        if not path.exists():
            raise InstallError(f"{releases[said].label} is not installed: nodectl core install {name} --version {said}")
        return path
    path = Path(said).expanduser().absolute()
    if not path.is_file():
        raise InstallError(f"{said} is neither a release of {name} ({', '.join(releases)}) nor a file")
    version_of(CORES[name][0], path)
    return path
