"""Cores on this machine: which releases are known, installed and used. `drivers.install` does the work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from drivers.install.install import cores_directory, find, version_of
from drivers.install.install import install as install_core
from drivers.install.releases import CORES, Core, choose
from drivers.install.releases import InstallError as InstallError
from node.nodectl.local_node import LocalNode

# The releases that are installed by default, by the names of the cores.
PINNED: Mapping[str, Core] = {name: releases[0] for name, releases in CORES.items()}


@dataclass(frozen=True)
class Found:
    """A release of a core; `path` if it is installed, `pinned` for the one that is installed by default."""

    core: str
    release: str
    path: str
    pinned: bool
    used: bool


def directory_of(local: LocalNode) -> Path:
    """The directory of this node's cores. Raises `InstallError`."""
    named = local.values.get("TXNODE_CORES")
    return (local.directory / named).absolute() if named else cores_directory()


def used(local: LocalNode, name: str) -> tuple[Path, str] | None:
    """The executable that the node would start now, and its version. Raises `InstallError` if it is not this core."""
    core = PINNED[name]
    path = find(core, local.values.get(core.variable("EXECUTABLE_PATH")) or None, directory=directory_of(local))
    return (path, version_of(core, path)) if path else None


def found(local: LocalNode) -> Iterator[Found]:
    """All known releases, and the core in use if it is not one of them. Raises `InstallError`."""
    directory = directory_of(local)
    for name, releases in CORES.items():
        now = used(local, name)
        paths = {core.release: _executable(core, directory) for core in releases}
        for release, path in paths.items():
            there = str(path) if path.exists() else ""
            yield Found(name, release, there, release == releases[0].release, now is not None and now[0] == path)
        if now and now[0] not in paths.values():
            yield Found(name, now[1], str(now[0]), False, True)


def install(local: LocalNode, name: str, release: str | None = None, newest: bool = False) -> Path:
    """Install a release and return its path. Without a release: with `newest` the pinned one, else any supported one.

    An installed release stays as it is. Prints progress to standard error. Raises `InstallError`.
    """
    core = choose(name, release)
    return install_core(core, newest or release is not None, directory_of(local))


def named(local: LocalNode, name: str, which: str) -> Path:
    """The executable of an installed release, or at a path. Raises `InstallError` if it is not this core."""
    releases: Mapping[str, Core] = {core.release: core for core in CORES[name]}
    if which in releases:
        path = _executable(releases[which], directory_of(local))
        if not path.exists():
            raise InstallError(
                f"{releases[which].label} is not installed: nodectl core install {name} --version {which}"
            )
        return path
    path = Path(which).expanduser().absolute()
    if not path.is_file():
        raise InstallError(f"{which} is neither a release of {name} ({', '.join(releases)}) nor a file")
    version_of(PINNED[name], path)
    return path


def _executable(core: Core, directory: Path) -> Path:
    """The path of an installed release."""
    return directory / f"{core.name}-{core.release}" / core.executable
