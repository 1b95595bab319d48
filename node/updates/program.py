"""Another version of the node itself: its wheel, installed where this one is, and become by this process."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from collections.abc import Awaitable, Callable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from shutil import rmtree

from twisted.internet.defer import CancelledError
from twisted.internet.threads import deferToThreadPool

from node import __version__
from node.errors import NodeError
from node.reactor import PooledReactor
from node.updates.jobs import Refused, Step
from node.updates.tool import ROOT, Tool
from node.waiting import finished

NAME = "txnode"
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+_]{0,40}")
_PIP = ("-P", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index")


class Program:
    """`directory` has wheels. `test` asks modules in a directory whether they could take over, `become` is the upgrade
    in place, which returns only with why it cannot be. Both raise what refuses.
    """

    def __init__(
        self,
        reactor: PooledReactor,
        directory: Path,
        tool: Tool,
        url: str,
        test: Callable[[Path], Awaitable[str]],
        become: Callable[[], Awaitable[str]],
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._tool = tool
        self._url = url
        self._test = test
        self._become = become

    async def update(self, version: str, sha256: str, step: Step) -> None:
        """Have this version, or what is installed by now. Returns never, or raises `Refused`."""
        step.say("looking what there is", before=__version__)
        if version:
            await self._install(version, sha256, step)
        step.say("becoming it")
        await step.kept()
        step.jobs.resting = True
        try:
            reason = await self._become()
        except CancelledError as ended:
            # It is not known to be one that can be become: the node's next start is not the time to find out.
            if version:
                await self._restore(step, ended)
            raise
        finally:
            step.jobs.resting = False
        if version:
            await self.put_back(step)
        raise Refused(reason)

    async def _install(self, version: str, sha256: str, step: Step) -> None:
        require_installable()
        if not self._url:
            raise Refused("UPDATE_URL does not say where wheels of the node are")
        if not _VERSION.fullmatch(version):
            raise Refused(f"{version!r} is no version")
        url = f"{self._url.rstrip('/')}/{NAME}-{version}-py3-none-any.whl"
        # Beside the one of now, which is for the way back.
        wheel = await self._tool.bring(
            step, "wheel", "--url", url, "--into", str(self._directory / "next"), "--sha256", sha256
        )
        step.say("trying it")
        await self._tool.run(step, [sys.executable, *_PIP[:-2], "--no-index", "--dry-run", str(wheel)])
        tried = self._directory / "try"
        await self._in_pool(lambda: rmtree(tried, ignore_errors=True))
        await self._tool.run(step, [sys.executable, *_PIP, "--target", str(tried), str(wheel)])
        await self._test(tried)
        await self._in_pool(lambda: rmtree(tried, ignore_errors=True))
        await self._in_pool(lambda: pack(distribution(NAME), self._before))
        step.say("installing it", after=version)
        await step.kept()
        try:
            # Not broken off: half a node on disk does not start.
            await finished(self._pip(wheel, step))
        except (NodeError, CancelledError) as error:
            await self._restore(step, error)
            raise

    async def _restore(self, step: Step, error: BaseException) -> None:
        try:
            await finished(self.put_back(step))
        except NodeError as other:
            reason = error.text if isinstance(error, NodeError) else "the node ended meanwhile"
            raise Refused(f"{reason}; and what was there before is not: {other.text}: install the node anew") from other

    async def put_back(self, step: Step) -> None:
        """Have what was installed before again, on disk."""
        wheels = sorted(self._before.glob("*.whl"))
        if wheels:
            step.say("installing what was there before")
            await self._pip(wheels[0], step)

    @property
    def _before(self) -> Path:
        return self._directory / "before"

    async def _pip(self, wheel: Path, step: Step) -> None:
        await self._tool.run(step, [sys.executable, *_PIP, "--force-reinstall", str(wheel)])

    async def _in_pool(self, work: Callable[[], object]) -> None:
        await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), work)


def require_installable() -> None:
    """Raises `Refused` where this program is not one that it can replace on disk."""
    try:
        installed = distribution(NAME)
    except PackageNotFoundError:
        installed = None
    if installed is None or not (ROOT / f"{NAME}-{installed.version}.dist-info").is_dir():
        raise Refused("the node runs from a clone: bring that up to date, then ask for an update without a version")
    for place in (ROOT, Path(sys.prefix, "bin")):
        if not os.access(place, os.W_OK):
            raise Refused(
                f"{place} is not the node's to write, as it should be: install the version as root (scripts/install "
                "has --version), then ask for an update without a version"
            )


def pack(installed: Distribution, into: Path) -> Path:
    """A wheel of what is installed, for the way back. Blocking."""
    rmtree(into, ignore_errors=True)
    into.mkdir(mode=0o700, parents=True)
    wheel = into / f"{NAME}-{installed.version}-py3-none-any.whl"
    data = f"{NAME}-{installed.version}.data/data"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in installed.files or ():
            name, path = PurePosixPath(file), Path(os.fspath(file.locate()))
            if (
                name.suffix == ".pyc"
                or not path.is_file()
                or name.name in ("INSTALLER", "REQUESTED", "direct_url.json")
            ):
                continue
            if name.parts[0] != "..":
                archive.write(path, str(name))
            elif path.resolve().is_relative_to(Path(sys.prefix, "share").resolve()):
                archive.write(path, f"{data}/{path.resolve().relative_to(Path(sys.prefix).resolve())}")
    return wheel
