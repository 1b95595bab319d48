"""The Xray driver: a configuration is converted and taken over, a core is run from it, users change while it runs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from twisted.internet.task import deferLater

from drivers import json_text
from drivers.process import readiness as starting
from drivers.process.child import CoreProcess
from drivers.process.executable import Executable
from drivers.process.orphans import sweep
from drivers.process.spawn import Done
from drivers.xray import config
from drivers.xray.access import Shown
from drivers.xray.api import Api
from drivers.xray.connections import Connections
from drivers.xray.executable import SETTINGS, files, installation
from drivers.xray.generation import XrayGeneration
from drivers.xray.users import refusals
from node.contract.accounts import Accounts, Change, Refusal, apply
from node.contract.driver import End, Host
from node.errors import CoreFailed, InvalidConfig, PortTaken

# The first version whose api.listen may be a unix socket.
DIRECT_API = (26, 5, 3)
# Xray's exit code for a configuration that it does not take; a port that is taken has another.
REFUSED = 23
# Seconds that a new run may take to come up while users change, and between two tries to get its ports.
START_SECONDS = 5.0
PORT_RETRY = 0.05
# Seconds for which changes are collected that take a new run, which ends everybody's connections.
WINDOW = 0.3
_FROM_PROTOBUF = ("-format", "protobuf", "-c", "stdin:")
# How its commands begin to say that they do not take a configuration.
_VERDICT = re.compile(r"^failed to ", re.IGNORECASE)
_CHATTER = re.compile(r"^(\d{4}/\d\d/\d\d |Output ProtoBuf file|Xray \d|A unified platform)")


class Xray:
    """Satisfies `node.contract.driver.Driver`."""

    settings = SETTINGS
    name = "xray"
    window = WINDOW

    def __init__(self, host: Host) -> None:
        self._host = host
        self._installation = installation(host)

    def fingerprint(self, config_text: str) -> str:
        return json_text.fingerprint(config_text)

    async def version(self) -> str:
        return (await self._installation.current()).version

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> config.Plan:
        xray = await self._installation.current()
        done = await self._run(xray, "convert", "pb", "-outpbfile", "/dev/fd/3", "stdin:", stdin=config_text.encode())
        return await starting.read(
            self._host.reactor, config_text, config.plan, done.output, config_text, exclude, xray.number
        )

    async def check(self, plan: config.Plan) -> None:
        await self._test(plan, {tag: {} for tag in plan.tags})

    async def launch(self, plan: config.Plan, target: Mapping[str, Accounts], seconds: float) -> XrayGeneration:
        # As it is now: users change while the core comes up.
        target = {tag: dict(accounts) for tag, accounts in target.items()}
        xray = await self._installation.current()
        api, connections = self._new_api(xray), Connections(self._host.reactor, plan.doors)
        message = await starting.built(self._host.reactor, target, config.render, plan, api, target)
        read = files(xray)
        core = self._spawn(xray, message, api, _sifter(api, connections, plan.shown))
        channel = Api(api.socket)
        await self._ready(core, channel, Path(api.socket), seconds)
        return XrayGeneration(self._host, plan, core, channel, api, connections, target, read)

    async def apply(
        self, generation: XrayGeneration, changes: Sequence[Change], end: End
    ) -> tuple[XrayGeneration, list[Refusal]]:
        refused, left = await generation.apply(changes)
        if not left:
            return generation, refused
        newest, not_brought = await self._bring_in(generation, left, end)
        return newest, refused + not_brought

    async def _bring_in(
        self, generation: XrayGeneration, left: Sequence[Change], end: End
    ) -> tuple[XrayGeneration, list[Refusal]]:
        """Bring changes into force by a new run of the core, which ends all connections.

        Whoever leaves is out, even if the core refuses those who come. Raises `CoreFailed` if no core runs any more.
        """
        target, refused = apply(left, generation.accounts), list[Refusal]()
        try:
            await self._test(generation.plan, target)
        except InvalidConfig as fault:
            leaving = [Change(tag, key, None) for tag, key, _ in left if key in generation.accounts[tag]]
            target, refused = apply(leaving, generation.accounts), refusals(left, fault.text)
            if not leaving:
                return generation, refused
        if not generation.alive:
            # It ended by itself meanwhile: with the next run they come.
            return generation, refusals(left, "the core is gone")
        await end(generation)
        return await self._launch_again(generation.plan, target), refused

    async def _launch_again(self, plan: config.Plan, target: Mapping[str, Accounts]) -> XrayGeneration:
        """Run a plan that ran a moment ago. Raises `CoreFailed`, whatever kept it from running."""
        deadline = self._host.reactor.seconds() + START_SECONDS
        while True:
            try:
                return await self.launch(plan, target, deadline - self._host.reactor.seconds())
            except PortTaken:
                if self._host.reactor.seconds() + PORT_RETRY > deadline:
                    raise
                await deferLater(self._host.reactor, PORT_RETRY)
            except InvalidConfig as fault:
                raise CoreFailed(fault.text) from fault

    def sweep(self) -> list[int]:
        orphans = sweep(self._host.directory)
        for socket in self._host.directory.glob("*.sock*"):
            socket.unlink()
        return orphans

    async def _test(self, plan: config.Plan, target: Mapping[str, Accounts]) -> None:
        """Have the core build everything with these users, and bind nothing. Raises `InvalidConfig`."""
        xray = await self._installation.current()
        message = await starting.built(self._host.reactor, target, config.render, plan, self._new_api(xray), target)
        await self._run(xray, "run", "-test", *_FROM_PROTOBUF, stdin=message)

    async def _run(self, xray: Executable, *arguments: str, stdin: bytes) -> Done:
        """Have the core look at a configuration. Raises as `starting.judge`."""
        done = await xray.run(*arguments, stdin=stdin)
        starting.judge(done, _VERDICT, _cause)
        return done

    def _new_api(self, xray: Executable) -> config.Endpoint:
        token = secrets.token_hex(8)
        return config.Endpoint(str(self._host.directory / f"{token}.sock"), token, xray.number >= DIRECT_API)

    def _spawn(
        self, xray: Executable, message: bytes, api: config.Endpoint, sift: Callable[[list[str]], list[str]]
    ) -> CoreProcess:
        core = CoreProcess(self._host.reactor, self._host.log.extend, sift)
        xray.start(core, "run", *_FROM_PROTOBUF, contents={0: message})
        core.when_exited().addCallback(lambda _: _remove_socket(Path(api.socket)))
        return core

    async def _ready(self, core: CoreProcess, channel: Api, socket: Path, seconds: float) -> None:
        """Wait until the core answers. Raises `CoreFailed` with its last lines, and leaves no process."""

        async def answers() -> bool:
            return socket.exists() and await self._host.aio.run(channel.ready(starting.CALL))

        try:
            await starting.ready(self._host.reactor, core, answers, seconds, _is_refusal, _cause)
        except BaseException:
            await self._host.aio.run(channel.close())
            raise


def _is_refusal(core: CoreProcess) -> bool:
    return core.exit is not None and core.exit.code == REFUSED


def _sifter(api: config.Endpoint, connections: Connections, shown: Shown) -> Callable[[list[str]], list[str]]:
    """What of the core's lines goes into the log: none about the node's own API connections, and what was asked for."""

    def sift(lines: list[str]) -> list[str]:
        kept = []
        for line in lines:
            if api.token in line:
                continue
            connections.take(line)
            if (text := shown.line(line)) is not None:
                kept.append(text)
        return kept

    return sift


def _remove_socket(socket: Path) -> None:
    """Xray removes it on a clean exit only."""
    for path in (socket, socket.with_name(socket.name + ".lock")):
        path.unlink(missing_ok=True)


def _cause(lines: Sequence[str]) -> str:
    """What the core says last about its failure, the lines of mere progress left out."""
    telling = [line for line in lines if line.strip() and not _CHATTER.match(line)]
    return starting.last(telling)
