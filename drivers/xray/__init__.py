"""The Xray driver: a configuration is converted and taken over, a core is run from it, users change while it runs."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from drivers import process
from drivers.cores import InstallError, choose
from drivers.install import find
from drivers.interface import Host
from drivers.process import CoreProcess
from drivers.xray import config
from drivers.xray.api import Api
from drivers.xray.generation import XrayGeneration
from drivers.xray.geo import assets
from node.errors import CoreFailed, InvalidConfig
from node.users import Accounts, Change, Refusal

# The first version whose api.listen may be a unix socket.
DIRECT_API = (26, 5, 3)
READY_POLL = 0.01
# Lines of the core in the text of an error.
LAST_LINES = 5
# Above this many users a configuration is built in the reactor's pool.
BUILD_INLINE = 5000
_VERSION = re.compile(r"^Xray (\d+)\.(\d+)\.(\d+)")
_CHATTER = re.compile(r"^(\d{4}/\d\d/\d\d |Output ProtoBuf file)")


class Xray:
    """Satisfies `drivers.interface.Driver`.

    Settings: XRAY_EXECUTABLE_PATH, XRAY_ASSETS_PATH, XRAY_SPLICE ("on" lets the kernel splice Vision connections; their
    bytes are then counted only when they end).
    """

    name = "xray"
    log = Logger()

    def __init__(self, host: Host) -> None:
        self._host = host
        self._executable: Path | None = None
        # The version, and the file's time of change that it belongs to.
        self._version: tuple[int, tuple[int, int, int]] | None = None

    async def version(self) -> str:
        _, version = await self._core()
        return ".".join(map(str, version))

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> config.Plan:
        executable, _ = await self._core()
        done = await self._run(
            executable, "convert", "pb", "-outpbfile", "/dev/fd/3", "stdin:", stdin=config_text.encode()
        )
        if done.code != 0:
            raise InvalidConfig(f"the core refuses the configuration: {_cause(done.lines)}")
        return config.plan(done.output, config_text, exclude)

    async def check(self, plan: config.Plan) -> None:
        executable, version = await self._core()
        api = self._new_api(version)
        message = config.render(plan, api, {tag: {} for tag in plan.tags})
        done = await self._run(executable, "run", "-test", "-format", "protobuf", "-c", "stdin:", stdin=message)
        if done.code != 0:
            raise InvalidConfig(f"the core refuses the configuration: {_cause(done.lines)}")

    async def launch(self, plan: config.Plan, target: Mapping[str, Accounts], seconds: float) -> XrayGeneration:
        executable, version = await self._core()
        api = self._new_api(version)
        users = sum(map(len, target.values()))
        if users > BUILD_INLINE:
            pool = self._host.reactor.getThreadPool()
            message = await deferToThreadPool(self._host.reactor, pool, config.render, plan, api, target)
        else:
            message = config.render(plan, api, target)
        core = self._spawn(executable, message, api)
        channel = Api(api.socket)
        await self._ready(core, channel, Path(api.socket), seconds)
        generation = XrayGeneration(self._host, plan, core, channel, frozenset((api.inbound, api.outbound)))
        generation.accounts = {tag: dict(accounts) for tag, accounts in target.items()}
        return generation

    async def apply(
        self, generation: XrayGeneration, changes: Sequence[Change]
    ) -> tuple[XrayGeneration, list[Refusal]]:
        return generation, await generation.apply(changes)

    def sweep(self) -> list[int]:
        return process.sweep(self._host.directory)

    async def _core(self) -> tuple[Path, tuple[int, int, int]]:
        """The executable and its version; looked for once, asked anew when the file changes."""
        if self._executable is None or not self._executable.is_file():
            self._executable = await self._find()
        executable = self._executable
        stamp = executable.stat().st_mtime_ns
        if self._version is None or self._version[0] != stamp:
            self._version = stamp, await self._ask_version(executable)
        return executable, self._version[1]

    async def _find(self) -> Path:
        configured = self._host.settings.get("XRAY_EXECUTABLE_PATH") or None
        pool = self._host.reactor.getThreadPool()
        try:
            found = await deferToThreadPool(self._host.reactor, pool, find, choose("xray"), configured)
        except InstallError as fault:
            raise CoreFailed(str(fault)) from fault
        if found is None:
            raise CoreFailed("there is no Xray on this machine: run `python -m drivers.install xray`")
        return found

    async def _ask_version(self, executable: Path) -> tuple[int, int, int]:
        done = await self._run(executable, "version")
        match = _VERSION.match(done.lines[0]) if done.lines else None
        if match is None:
            raise CoreFailed(f"{executable} does not say which Xray it is")
        major, minor, patch = match.groups()
        return int(major), int(minor), int(patch)

    async def _run(self, executable: Path, *arguments: str, stdin: bytes = b"") -> process.Done:
        return await process.run(
            self._host.reactor,
            [str(executable), *arguments],
            environment=self._environment(executable),
            owner=self._host.directory,
            stdin=stdin,
        )

    def _environment(self, executable: Path) -> dict[str, str]:
        """Clean: nothing of the node's own reaches the core, its key least of all."""
        configured = self._host.settings.get("XRAY_ASSETS_PATH")
        directory = assets(Path(configured) if configured else None, executable, self._host.directory / "assets")
        environment = {
            "PATH": os.defpath,
            "TZ": "UTC",
            "XRAY_LOCATION_ASSET": str(directory),
            # Else listeners are MPTCP, and cannot be handed over to a next generation.
            "GODEBUG": "multipathtcp=0",
        }
        if self._host.settings.get("XRAY_SPLICE", "off") != "on":
            environment["XRAY_BUF_SPLICE"] = "disable"
        return environment

    def _new_api(self, version: tuple[int, int, int]) -> config.Api:
        token = secrets.token_hex(8)
        return config.Api(str(self._host.directory / f"{token}.sock"), token, version >= DIRECT_API)

    def _spawn(self, executable: Path, message: bytes, api: config.Api) -> CoreProcess:
        """Its own API connections stay out of what it logs."""

        def take(lines: list[str]) -> None:
            self._host.log.extend(line for line in lines if api.token not in line)

        core = CoreProcess(self._host.reactor, take)
        source = process.memory_file(message)
        try:
            process.spawn(
                core,
                self._host.reactor,
                process.leashed([str(executable), "run", "-format", "protobuf", "-c", "stdin:"]),
                environment=self._environment(executable),
                owner=self._host.directory,
                files={0: source},
            )
        finally:
            os.close(source)
        core.when_exited().addCallback(lambda _: remove_socket(Path(api.socket)))
        return core

    async def _ready(self, core: CoreProcess, channel: Api, socket: Path, seconds: float) -> None:
        """Wait until the core answers. Raises `CoreFailed` with its last lines, and leaves no process."""
        deadline = self._host.reactor.seconds() + seconds
        try:
            while core.exit is None:
                if self._host.reactor.seconds() > deadline:
                    raise CoreFailed(f"the core did not answer within {seconds:g} s: {_cause(core.last_lines)}")
                if socket.exists() and await self._host.aio.run(channel.ready(1.0)) is not None:
                    return
                await deferLater(self._host.reactor, READY_POLL)
            raise CoreFailed(f"the core did not start: {_cause(core.last_lines)}")
        except BaseException:
            await core.stop()
            await self._host.aio.run(channel.close())
            raise


def remove_socket(socket: Path) -> None:
    """Xray removes it on a clean exit only."""
    for path in (socket, socket.with_name(socket.name + ".lock")):
        path.unlink(missing_ok=True)


def _cause(lines: Sequence[str]) -> str:
    """What the core says last about its failure, the lines of mere progress left out."""
    telling = [line for line in lines if line.strip() and not _CHATTER.match(line)]
    return "\n".join(telling[-LAST_LINES:]) or "it said nothing"
