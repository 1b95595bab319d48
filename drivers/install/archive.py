"""Download an official archive, verify its pinned digest, and extract only the wanted members."""

from __future__ import annotations

import hashlib
import lzma
import platform
import tarfile
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO

from drivers.install.releases import Archive, Core, DigestMismatch, InstallError, Unavailable

SILENCE = 10.0
"""Seconds for a connection to open, and for the next bytes to come."""

PATIENCE = 600.0
"""Seconds that a whole download may take; for an update, all its downloads together."""

LIMIT = 256 * 1024 * 1024
"""The most bytes of a download, or of one member of an archive."""

# The exceptions of the standard library for a bad archive; RuntimeError for one with a password or an unknown method.
DAMAGED = (
    *(OSError, EOFError, KeyError, RuntimeError, ValueError),
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
)
_CHUNK = 1024 * 1024
_CPUS = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def choose(core: Core) -> Archive:
    """Return the archive of `core` for this machine. Raises Unavailable if there is none."""
    archive = core.archives.get(cpu())
    if archive is None:
        system, machine = platform.system(), platform.machine().lower()
        raise Unavailable(f"no archive of {core.label} is known for this machine ({system}, {machine})")
    return archive


def cpu() -> str:
    """Return Go's name of this machine's CPU; empty where the system is not Linux."""
    machine = platform.machine().lower()
    return _CPUS.get(machine, machine) if platform.system() == "Linux" else ""


def verify(file: Path, sha256: str) -> None:
    """Raises DigestMismatch if a file does not have the pinned digest."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise DigestMismatch(f"{file.name} has the SHA-256 {found}, but {sha256} is pinned: nothing installed")


def download(url: str, sha256: str, into: Path) -> None:
    """Download `url` to the file `into`, which is removed if this raises.

    Raises Unavailable if the file does not arrive whole, DigestMismatch if it does with another digest, and
    InstallError if `url` is not a URL to download from.
    """
    if not url.startswith(("https://", "http://")):
        raise InstallError(f"{url}: a download URL must begin with https:// or http://")
    try:
        found = _fetch(url, into)
        if found != sha256:
            raise DigestMismatch(f"{url} has the SHA-256 {found}, but {sha256} is pinned: removed, nothing installed")
    except BaseException:
        into.unlink(missing_ok=True)
        raise


def _fetch(url: str, into: Path) -> str:
    try:
        return _stream(url, into)
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error
    except ValueError as error:
        raise InstallError(f"{url} is not a URL to download from: {error}") from error


def _stream(url: str, into: Path) -> str:
    """Copy `url` to a file; return its SHA-256. Raises OSError or HTTPException if fewer bytes come than announced."""
    deadline = time.monotonic() + PATIENCE
    hashed, size = hashlib.sha256(), 0
    request = urllib.request.Request(url, headers={"User-Agent": "txnode"})  # noqa: S310 (the scheme is checked)
    with urllib.request.urlopen(request, timeout=SILENCE) as reply, into.open("wb") as file:  # noqa: S310
        announced: int | None = reply.length
        while size != announced and (chunk := reply.read1(_CHUNK)):
            size += len(chunk)
            if size > LIMIT or time.monotonic() > deadline:
                raise OSError(f"too large or too slow: gave up after {size} bytes")
            hashed.update(chunk)
            file.write(chunk)
    # http.client does not report a connection that closes before the announced end.
    if announced is not None and size != announced:
        raise OSError(f"received {size} of {announced} bytes")
    return hashed.hexdigest()


def unpack(archive: Path, members: Iterable[str], into: Path) -> None:
    """Extract each of `members` to the directory `into`, under the last part of its name.

    Paths, modes and sizes in the archive are not trusted. Raises Unavailable if a member is missing, damaged or larger
    than LIMIT.
    """
    take = _from_tar if archive.name.endswith(".tar.gz") else _from_zip
    try:
        take(archive, members, into)
    except DAMAGED as error:
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
