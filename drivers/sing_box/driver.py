"""The sing-box driver: a configuration is taken over, a core is run from it, and another one when users come."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from twisted.internet.task import deferLater

from drivers import json_text
from drivers.process import readiness as starting
from drivers.process.child import CoreProcess
from drivers.process.executable import Executable
from drivers.process.orphans import sweep
from drivers.process.ports import free_ports
from drivers.process.spawn import Done
from drivers.sing_box import config
from drivers.sing_box.accounts import name_of, unlabelled
from drivers.sing_box.api import Api
from drivers.sing_box.executable import SETTINGS, counts, installation
from drivers.sing_box.fronts import Fronts
from drivers.sing_box.generation import SingBoxGeneration
from node.contract.accounts import Accounts, Change, Refusal, apply
from node.contract.driver import End, Host
from node.errors import CoreFailed, InvalidConfig, NodeError, PortTaken
from node.logs import Logger

# Seconds that a new run may take to come up while users change, and between two tries to get its ports.
START_SECONDS = 5.0
PORT_RETRY = 0.05
# Seconds for which changes are collected: bringing them into force ends everybody's connections.
WINDOW = 0.3
# Where the core finds the file of live users: a descriptor, so that their keys are in no directory.
_ROLL = 3
_STDIN = ("-c", "stdin", "--disable-color")
_FATAL = re.compile(r"FATAL\[\d+\] (.*)")
# How the core says, at the latest when it starts, that a configuration is at fault (`cmd/sing-box/cmd_run.go`), …
_AT_FAULT = re.compile(r"decode config|create service:|.* not found")
# … and what it says of a machine even so.
_PASSING = ("address already in use", "cannot assign requested address", "permission denied")


class SingBox:
    """Satisfies `node.contract.driver.Driver`."""

    settings = SETTINGS
    name = "sing-box"
    window = WINDOW
    log = Logger()

    def __init__(self, host: Host) -> None:
        self._host = host
        self._installation = installation(host)

    def fingerprint(self, config_text: str) -> str:
        return json_text.fingerprint(config_text)

    async def version(self) -> str:
        return (await self._installation.current()).version

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> config.Plan:
        core = await self._installation.current()
        done = await self._run(core, "format", stdin=config_text.encode(), output=1)
        return await starting.read(
            self._host.reactor, config_text, config.plan, done.output, exclude, self._host.directory, counts(core)
        )

    async def check(self, plan: config.Plan) -> None:
        core = await self._installation.current()
        await self._run(
            core, "check", stdin=await self._render(plan, _endpoint(core, plan), {tag: {} for tag in plan.tags})
        )

    async def launch(self, plan: config.Plan, target: Mapping[str, Accounts], seconds: float) -> SingBoxGeneration:
        # As it is now: users change while the core comes up.
        target = {tag: dict(accounts) for tag, accounts in target.items()}
        executable = await self._installation.current()
        endpoint = _endpoint(executable, plan)
        text = await self._render(plan, endpoint, target, f"/proc/self/fd/{_ROLL}")
        roll = await starting.built(self._host.reactor, target, config.roll, plan, endpoint, target)
        core = CoreProcess(self._host.reactor, self._host.log.extend, _sifter(endpoint))
        executable.start(core, "run", *_STDIN, "-D", str(self._host.directory), contents={0: text, _ROLL: roll})
        api = Api(endpoint, plan.live, Fronts(plan.fronts))
        aio = self._host.aio
        try:
            await starting.ready(
                self._host.reactor, core, lambda: aio.run(api.ready(starting.CALL)), seconds, _is_refusal, _cause
            )
            await aio.run(api.begin())
        except BaseException:
            try:
                await core.stop()
            finally:
                await aio.run(api.close())
            raise
        return SingBoxGeneration(self._host, plan, core, api, endpoint, target)

    async def apply(
        self, generation: SingBoxGeneration, changes: Sequence[Change], end: End
    ) -> tuple[SingBoxGeneration, list[Refusal]]:
        """What is free is in force at once; the rest takes a new core, which ends all connections."""
        free = generation.free(changes)
        refused = await generation.admit(free)
        if len(free) == len(changes):
            return generation, refused
        admitted = set(free)
        coming = [change for change in changes if change not in admitted]
        newest, not_brought = await self.bring_in(generation, coming, end)
        return newest, refused + not_brought

    async def bring_in(
        self, generation: SingBoxGeneration, coming: Sequence[Change], end: End
    ) -> tuple[SingBoxGeneration, list[Refusal]]:
        """Bring a configuration with these users into force: it is checked, then the old run ends and a new one begins.

        A core that cannot be run with them runs again without any of them, and whoever leaves is out. Raises
        `CoreFailed` if not even that: whatever it was, no core runs then.
        """
        before = generation.accounts
        target = apply(coming, before)
        without = apply([change._replace(packed=None) for change in coming], before)
        executable = await self._installation.current()
        text = await self._render(generation.plan, _endpoint(executable, generation.plan), target)
        try:
            await self._run(executable, "check", stdin=text)
        except (InvalidConfig, CoreFailed) as fault:
            return generation, _refusals(coming, before, fault.text)
        if not generation.alive:
            # It ended by itself meanwhile: with the next run they come, which others see to.
            return generation, _refusals(coming, before, "the core is gone")
        await self._end(generation, end)
        try:
            return await self._launch_again(generation.plan, target), []
        except CoreFailed as error:
            self.log.error("a core did not come up with changed users: {reason}", reason=error.text)
            refused = _refusals(coming, {}, error.text)
            return await self._launch_again(generation.plan, without), refused

    async def _end(self, generation: SingBoxGeneration, end: End) -> None:
        """Have the old core ended. Raises `CoreFailed`, and then it is gone all the same."""
        try:
            await end(generation)
        except Exception as error:
            generation.kill()
            raise self._failed(error) from error

    async def _launch_again(self, plan: config.Plan, target: Mapping[str, Accounts]) -> SingBoxGeneration:
        """Launch a core where one ran. Raises `CoreFailed`, whatever the reason is that there is none."""
        deadline = self._host.reactor.seconds() + START_SECONDS
        while True:
            try:
                return await self.launch(plan, target, deadline - self._host.reactor.seconds())
            except PortTaken:
                if self._host.reactor.seconds() + PORT_RETRY > deadline:
                    raise
                await deferLater(self._host.reactor, PORT_RETRY)
            except Exception as error:
                raise self._failed(error) from error

    def _failed(self, error: Exception) -> CoreFailed:
        """What is told of an error that leaves no core; the log has the rest of what nobody foresaw."""
        if isinstance(error, NodeError):
            return CoreFailed(error.text)
        self.log.failure("a core was not started")
        return CoreFailed(f"internal error: {type(error).__name__}: {error}")

    def sweep(self) -> list[int]:
        return sweep(self._host.directory)

    async def _run(self, core: Executable, *arguments: str, stdin: bytes, output: int = 3) -> Done:
        """Have the core look at a configuration. Raises as `starting.judge`."""
        done = await core.run(*arguments, *_STDIN, stdin=stdin, output=output)
        starting.judge(done, _FATAL, _cause)
        return done

    async def _render(
        self, plan: config.Plan, api: config.Endpoint, target: Mapping[str, Accounts], roll: str = ""
    ) -> bytes:
        return await starting.built(self._host.reactor, target, config.render, plan, api, target, roll)


def _endpoint(core: Executable, plan: config.Plan) -> config.Endpoint:
    try:
        return config.Endpoint.new(free_ports, counts(core), bool(plan.live))
    except OSError as fault:
        raise CoreFailed(f"the core cannot have a port for its API: {fault}") from fault


def _sifter(endpoint: config.Endpoint) -> Callable[[list[str]], list[str]]:
    """Where the APIs are is in no log, nor that they are closed twice. Users have their own names there."""
    where = "|".join(f"127\\.0\\.0\\.1:{port}" for port in endpoint.ports)
    telling = re.compile(rf"started at ({where})$|close tcp ({where}): use of closed")

    def sift(lines: list[str]) -> list[str]:
        return [unlabelled(line) for line in lines if not telling.search(line) and endpoint.secret not in line]

    return sift


def _is_refusal(core: CoreProcess) -> bool:
    """It ends with 1 whatever it was, a rule-set that could not be fetched among it: its words tell."""
    said = _cause(core.last_lines)
    at_fault = _AT_FAULT.match(said) and not any(words in said for words in _PASSING)
    return core.exit is not None and core.exit.code == 1 and bool(at_fault)


def _cause(lines: Sequence[str]) -> str:
    """What the core says of its end."""
    fatal = [match[1] for line in lines if (match := _FATAL.search(line))]
    return starting.last(fatal or [line for line in lines if line.strip()])


def _refusals(changes: Sequence[Change], staying: Mapping[str, Accounts], reason: str) -> list[Refusal]:
    """Of these nobody came in, and of those who are `staying` nobody left."""
    entries = ((tag, packed or staying.get(tag, {}).get(key)) for tag, key, packed in changes)
    return [Refusal(name_of(entry), f"{tag}: {reason}") for tag, entry in entries if entry is not None]
