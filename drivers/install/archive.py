"""The archives of cores: which one this machine needs, and how to extract the wanted members."""

from __future__ import annotations

import lzma
import platform
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO

from drivers.install.releases import Archive, Core, Unavailable

# The most bytes of one member of an archive.
LIMIT = 256 * 1024 * 1024
# The exceptions of the standard library for a bad archive; RuntimeError for one with a password or an unknown method.
_DAMAGED = (
    *(OSError, EOFError, KeyError, RuntimeError, ValueError),
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
)
_CHUNK = 1024 * 1024
_CPUS = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def choose(core: Core) -> Archive:
    """Return the archive of `core` for this machine. Raises Unavailable for an unknown core or machine."""
    archive = core.archives.get(cpu())
    if archive is None:
        system, machine = platform.system(), platform.machine().lower()
        raise Unavailable(f"no archive of {core.label} is known for this machine ({system}, {machine})")
    return archive


def cpu() -> str:
    """Return Go's name of this machine's CPU; empty where the system is not Linux."""
    machine = platform.machine().lower()
    return _CPUS.get(machine, machine) if platform.system() == "Linux" else ""


def unpack(archive: Path, members: Iterable[str], into: Path) -> None:
    """Extract each of `members` to the directory `into`, under the last part of its name.

    Paths, modes and sizes in the archive are not trusted. Raises Unavailable if a member is missing, damaged or larger
    than LIMIT.
    """
    take = _from_tar if archive.name.endswith(".tar.gz") else _from_zip
    try:
        take(archive, members, into)
    except _DAMAGED as error:
        raise Unavailable(f"cannot unpack {archive.name}: {error}") from error


def _from_zip(archive: Path, members: Iterable[str], into: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        for name in members:
            with opened.open(name) as source:
                _write(source, into, name)


def _from_tar(archive: Path, members: Iterable[str], into: Path) -> None:
    with tarfile.open(archive, "r:gz") as opened:
        for name in members:
            source = opened.extractfile(name)
            if source is None:
                raise KeyError(f"{name} is not a file")
            with source:
                _write(source, into, name)


def _write(source: IO[bytes], into: Path, name: str) -> None:
    size = 0
    with (into / PurePosixPath(name).name).open("xb") as file:
        while chunk := source.read(_CHUNK):
            size += len(chunk)
            if size > LIMIT:
                raise OSError(f"{name} has more than {LIMIT} bytes")
            file.write(chunk)
