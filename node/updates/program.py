"""Update the node itself: install a wheel where this version is, then upgrade this process in place."""

from __future__ import annotations

import os
import re
import sys
import zipfile
import zlib
from collections.abc import Awaitable, Callable, Sequence
from email.parser import HeaderParser
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath
from shutil import rmtree
from urllib.parse import quote

from packaging.version import InvalidVersion, Version
from twisted.internet.defer import CancelledError

from node import __version__
from node.base.errors import NodeError, shown
from node.base.pool import in_pool
from node.base.waiting import finished
from node.handover.upgrade import Upgrades
from node.updates.jobs import Refused, Stage, Step
from node.updates.replaceable import Kit

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+_]{0,40}")
_PIP = ("-P", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index")
NAME = "txnode"
# The most bytes of a wheel's description of itself.
METADATA = 1024 * 1024


class Program:
    """Updates of the node, from wheels below `url`, which one of `keys` has to have signed if there are any.

    `kept` has the copy of its modules to which a failed upgrade returns.
    """

    def __init__(self, kit: Kit, kept: Path, url: str, upgrades: Upgrades, keys: Sequence[str] = ()) -> None:
        self._reactor = kit.reactor
        self._tool = kit.tool
        self._directory = kit.directory / "node"
        self._next = self._directory / "next"
        self._before = self._directory / "before"
        self._kept = kept
        self._url = url
        self._upgrades = upgrades
        self._keys = [*keys]

    async def update(self, version: str, sha256: str, step: Step) -> None:
        """Upgrade to this version, or to what is installed now. Never returns; raises `Refused`."""
        step.say("checking the current version", before=__version__)
        if version:
            await self._install(version, sha256, step)
        step.say("upgrading the node to it")
        await step.jobs.save()
        step.jobs.stage = Stage.BECOMING
        try:
            reason = await self._upgrades.wanted()
        except CancelledError as ended:
            # Whether the new version can take over is not proven, so the next start must not run it.
            if version:
                await self._restore(step, ended)
            raise
        finally:
            step.jobs.stage = Stage.CHANGING
        if version:
            await self.put_back(step)
        raise Refused(reason)

    async def update_to_newest(self, step: Step) -> None:
        """Upgrade to the newest version at `url`, or without one to what is installed now. Raises `Refused`."""
        if not self._url:
            return await self.update("", "", step)
        step.say("asking for the newest version", before=__version__)
        signed = bool(self._keys)
        words = (await self._tool.ask(step, "latest", self._directory, url=self._url, signed=signed)).split()
        version, sha256 = words[0], "".join(words[1:])
        if version == __version__:
            step.conclude(f"{version} is the newest version already", version)
            return None
        require_newer(version, __version__)
        return await self.update(version, sha256, step)

    async def reset(self, step: Step, renew: Callable[[], Awaitable[object]]) -> None:
        """Start a fresh core beside the old one by `renew`, and hand over to a fresh process. Raises `Refused`."""
        step.say("starting a fresh core beside the old one")
        await renew()
        await self.update("", "", step)

    async def _install(self, version: str, sha256: str, step: Step) -> None:
        place, _ = installation(self._kept)
        require_writable(place)
        if not self._url:
            raise Refused("UPDATE_URL is not set: the node does not know where to fetch its wheels")
        if not _VERSION.fullmatch(version):
            raise Refused(f"{version!r} is not a version")
        if not sha256 and not self._keys:
            raise Refused(
                f"the SHA-256 of the wheel of {version} is missing (nodectl update node {version} --sha256 DIGEST); "
                "with UPDATE_KEY, the signature is enough"
            )
        # Some servers of files read a + as a space.
        url = f"{self._url.rstrip('/')}/{quote(wheel_name(version))}"
        wheel = await self._tool.bring(step, "wheel", self._next, url=url, sha256=sha256, keys=self._keys)
        try:
            await self._in_pool(lambda: require_release(wheel, version))
            await self._try(wheel, step)
        except (NodeError, CancelledError):
            await self._remove(self._next)
            raise
        step.say("installing it", after=version)
        await step.jobs.save()
        try:
            # Not cancelled: a half-installed node does not start.
            await finished(self._pip(wheel, step))
        except (NodeError, CancelledError) as error:
            await self._restore(step, error)
            raise

    async def _try(self, wheel: Path, step: Step) -> None:
        """Check that the wheel could take over, and pack what is installed, to go back to."""
        step.say("trying it")
        # With its dependencies: all of them have to be installed.
        await self._tool.run(step, [sys.executable, *_PIP, "--dry-run", str(wheel)])
        tried = self._directory / "try"
        await self._remove(tried)
        try:
            await self._tool.run(step, [sys.executable, *_PIP, "--no-deps", "--target", str(tried), str(wheel)])
            await self._upgrades.test(tried)
        finally:
            await self._remove(tried)
        await self._in_pool(lambda: pack(installation(self._kept)[1], self._before))

    async def _restore(self, step: Step, error: BaseException) -> None:
        try:
            await finished(self.put_back(step))
        except NodeError as other:
            reason = error.text if isinstance(error, NodeError) else "the node stopped during this job"
            failed = f"the previous version could not be installed again: {other.text}"
            raise Refused(f"{reason}; {failed}; reinstall the node") from other

    async def put_back(self, step: Step) -> None:
        """Install the previous version again, on disk only, and remove the wheel that failed."""
        wheels = sorted(self._before.glob("*.whl"))
        if wheels:
            step.say("installing the previous version again")
            await self._pip(wheels[0], step)
        await self._remove(self._next)

    def is_installed(self, version: str) -> bool:
        """Whether the next start runs the wheel that was fetched last. Blocking, brief.

        The contents are compared: two builds may have the same version.
        """
        try:
            place, _ = installation(self._kept)
        except Refused:
            return False
        return holds(place, self._next / wheel_name(version))

    async def _pip(self, wheel: Path, step: Step) -> None:
        await self._tool.run(step, [sys.executable, *_PIP, "--no-deps", "--force-reinstall", str(wheel)])

    async def _remove(self, directory: Path) -> None:
        await self._in_pool(lambda: rmtree(directory, ignore_errors=True))

    async def _in_pool(self, work: Callable[[], object]) -> None:
        try:
            await in_pool(self._reactor, work)
        except OSError as error:
            file = error.filename or self._directory
            raise Refused(f"{file} cannot be written: {error.strerror or error}") from error


def wheel_name(version: str) -> str:
    """Return the file name that pip requires for a wheel of this version."""
    return f"{NAME}-{version}-py3-none-any.whl"


def require_newer(version: str, running: str) -> None:
    """Raises `Refused` if this is no newer version: an old release is signed as well, and may have known weaknesses."""
    try:
        newer = Version(version) > Version(running)
    except InvalidVersion as error:
        raise Refused(f"UPDATE_URL/latest has {shown(version)}, which is not a version") from error
    if not newer:
        raise Refused(
            f"UPDATE_URL/latest has {version}, and {running} runs, which is newer: nothing is installed. To go back "
            f"to it all the same: nodectl update node {version}"
        )


def require_release(wheel: Path, version: str) -> None:
    """Raises `Refused` unless this wheel is the node's, of this version. Blocking, brief.

    The name of the file proves nothing: a server can offer another wheel, with its signature, under any name.
    """
    name = f"{NAME}-{version}.dist-info/METADATA"
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [each for each in archive.namelist() if PurePosixPath(each).match("*.dist-info/METADATA")]
            if found != [name] or archive.getinfo(name).file_size > METADATA:
                raise Refused(f"the wheel is not {NAME} {version}, but has {shown(', '.join(found))}: not installed")
            told = HeaderParser().parsestr(archive.read(name).decode())
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise Refused(f"the wheel of {version} is damaged: {error}: not installed") from error
    if (told["Name"], told["Version"]) != (NAME, version):
        raise Refused(
            f"the wheel says that it is {told['Name']} {told['Version']}, not {NAME} {version}: not installed"
        )


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
