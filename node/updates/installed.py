"""The installed node: find its modules on disk, compare them with a wheel, and pack them into a wheel."""

from __future__ import annotations

import os
import sys
import zipfile
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath
from shutil import rmtree

from node.updates.record import Refused

NAME = "txnode"


def wheel_name(version: str) -> str:
    """Return the file name that pip requires for a wheel of this version."""
    return f"{NAME}-{version}-py3-none-any.whl"


def installation(kept: Path) -> tuple[Path, Distribution]:
    """Return the directory from which the next start of the node imports, and the distribution installed there.

    After a version failed, the node runs from the copy in `kept`, which is not installed: the search skips it.
    Raises `Refused` if the modules belong to a clone.
    """
    found = PathFinder.find_spec("node", [entry for entry in sys.path if Path(entry) != kept])
    if found is not None and found.origin is not None:
        place = Path(found.origin).parents[1]
        for one in distributions(name=NAME, path=[str(place)]):
            if (place / f"{NAME}-{one.version}.dist-info").is_dir():
                return place, one
    raise Refused("the node runs from a Git clone: update the clone, then ask for an update without a version")


def require_writable(place: Path) -> None:
    """Raises `Refused` if the node may not write where it is installed."""
    for directory in (place, Path(sys.prefix, "bin")):
        if not os.access(directory, os.W_OK):
            raise Refused(
                f"the node may not write {directory}, as it should be: install the version as root "
                "(scripts/install has --version), then ask for an update without a version"
            )


def holds(place: Path, wheel: Path) -> bool:
    """Whether the directory has every module of this wheel, byte for byte. Blocking, brief."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.startswith(f"{NAME}-") and name[-1] != "/"]
            return all((place / name).read_bytes() == archive.read(name) for name in names)
    except (OSError, zipfile.BadZipFile):
        return False


def pack(installed: Distribution, into: Path) -> Path:
    """Pack the installed node into a wheel, to go back to. Blocking. Raises `OSError`, and then leaves no file."""
    rmtree(into, ignore_errors=True)
    into.mkdir(mode=0o700, parents=True)
    wheel = into / wheel_name(installed.version)
    try:
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            _fill(archive, installed)
    except OSError:
        rmtree(into, ignore_errors=True)
        raise
    return wheel


def _fill(archive: zipfile.ZipFile, installed: Distribution) -> None:
    data = f"{NAME}-{installed.version}.data/data"
    for file in installed.files or ():
        name, path = PurePosixPath(file), Path(os.fspath(file.locate()))
        if name.suffix == ".pyc" or not path.is_file() or name.name in ("INSTALLER", "REQUESTED", "direct_url.json"):
            continue
        if name.parts[0] != "..":
            archive.write(path, str(name))
        elif path.resolve().is_relative_to(Path(sys.prefix, "share").resolve()):
            archive.write(path, f"{data}/{path.resolve().relative_to(Path(sys.prefix).resolve())}")
