"""The Xray driver: has the core convert and check a configuration, launches it with users, recovers a run of it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from drivers.process import starting
from drivers.process.aliases import Aliases
from drivers.process.allowlist import Allowed
from drivers.process.child import CoreProcess
from drivers.process.closed import Closed
from drivers.process.confinement import Touched
from drivers.process.executable import Executable, Files
from drivers.process.generation import Started
from drivers.process.kept import recover
from drivers.process.plan import CoreDriver, CorePlan
from drivers.xray import abuse, allowlist, config, rules
from drivers.xray.accounts import spellings
from drivers.xray.api import Api
from drivers.xray.bars import TEXT, Bars, nesting
from drivers.xray.closed import OPEN, Closing, text_of
from drivers.xray.connections import Connections
from drivers.xray.executable import files as read_by
from drivers.xray.executable import installation
from drivers.xray.generation import Output, XrayGeneration
from drivers.xray.overrides import are_reloaded
from node.contract.accounts import Accounts
from node.contract.driver import Host
from node.contract.routing import Routing
from protos.handover_pb2 import XrayRun

# The first version whose api.listen may be a unix socket.
DIRECT_API = (26, 5, 3)
_FROM_PROTOBUF = ("-format", "protobuf", "-c", "stdin:")
# Xray's exit code for an invalid configuration; a port in use gives another.
REFUSED = 23
# Lines of progress of its commands.
_CHATTER = re.compile(r"^(\d{4}/\d\d/\d\d |Output ProtoBuf file|Xray \d|A unified platform)")


class Xray(CoreDriver):
    """Satisfies `node.contract.driver.Driver`."""

    name = "xray"
    verdict = re.compile(r"^failed to ", re.IGNORECASE)

    def __init__(self, host: Host) -> None:
        super().__init__(installation(host))
        # The last one: the core need not convert it again for each Start.
        self._closings: dict[object, Closing] = {}
        # The networks from which users are kept out, by key.
        self.barred: dict[str, Sequence[str]] = {}

    def rehearse(self, begin: bool) -> None:
        super().rehearse(begin)
        if begin:
            # The next node process needs this answer of the core, too.
            self._closings = {}

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> XrayPlan:
        chosen, text = self.installation.chosen, config_text
        xray = await self.installation.current(chosen)
        reactor, paths = self.host.reactor, self.installation.paths
        touched = await starting.read(reactor, text, allowlist.touched, text, paths)
        output = await self.converted(xray, touched, text)
        anywhere = await self.converted(xray, touched, abuse.ANYWHERE) if self.host.abuse else b""
        against = self.host.abuse, anywhere
        added = *against, await self._closing(xray)
        reading = config.plan, output, text, exclude, xray.number, Allowed.of(self.host), *added
        made = await starting.read(reactor, text, *reading)
        await starting.read(reactor, text, allowlist.check, made.base, paths, xray.unconfined)
        return XrayPlan(self, made, replace(touched, ports=made.ports), chosen)

    async def converted(self, xray: Executable, touched: Touched, text: str) -> bytes:
        """A configuration as the core's own message. Raises as `look`."""
        command, packed = ("convert", "pb", "-outpbfile", "/dev/fd/3", "stdin:"), text.encode()
        return await self.installation.answered(
            xray, "convert", packed, lambda: self.look(xray.touching(touched), *command, stdin=packed)
        )

    async def _closing(self, xray: Executable) -> Closing:
        """What keeps users from the server itself, for this executable. Raises as `look`."""
        closed = Closed.of(self.host)
        if not closed:
            return OPEN
        known = xray.path, xray.changed, closed
        if known not in self._closings:
            self._closings = {known: Closing(closed, await self.converted(xray, Touched(), text_of(closed)))}
        return self._closings[known]

    async def bars(self, xray: Executable, made: config.Plan, token: str) -> Bars:
        """What keeps users out of one run. Raises as `look`."""
        known = nesting(await self.converted(xray, Touched(), TEXT)) if made.fronted else ()
        return Bars(token, known, self.barred)

    @staticmethod
    def cause(lines: Sequence[str]) -> str:
        """The core's last line about its failure, without lines of progress."""
        return starting.last([line for line in lines if line.strip() and not _CHATTER.match(line)])


class XrayPlan(CorePlan[Xray, config.Plan]):
    """Satisfies `node.contract.driver.Reroutable`."""

    async def check(self, target: Mapping[str, Accounts]) -> None:
        xray = await self._executable()
        message = await self._rendered(self._new_api(xray), target, b"", self._aliases)
        await self._core.look(xray, "run", "-test", *_FROM_PROTOBUF, stdin=message)

    async def launch(self, target: Mapping[str, Accounts], seconds: float) -> XrayGeneration:
        # A copy: users change while the core starts.
        accounts = {tag: dict(some) for tag, some in target.items()}
        xray = await self._executable()
        endpoint = self._new_api(xray)
        bars = await self._core.bars(xray, self.made, endpoint.token)
        # Some may be let in while the core starts.
        barred = dict(bars.barred) if bars.nesting else {}
        aliases = self._aliases
        message = await self._rendered(endpoint, accounts, bars.settings(spellings(accounts, barred)), aliases)
        read = read_by(xray, are_reloaded(self.made.base))
        core, output = self._process(endpoint)
        xray.start(core, "run", *_FROM_PROTOBUF, contents={0: message})
        api = Api(self._host.reactor, endpoint.socket, aliases)
        started = Started(self._host, self._core.sharing, core, api, read, aliases)
        await started.ready(Path(endpoint.socket).exists, seconds, is_refusal, self._core.cause)
        run = XrayGeneration(started, self.made, endpoint, output, accounts, bars)
        run.barred = barred
        try:
            # Balancers are overridden by the API, since a configuration cannot.
            await run.reroute(self)
        except BaseException:
            run.kill()
            await run.stop()
            raise
        return run

    async def recover(self, left: bytes, exact: bool) -> XrayGeneration:
        found = XrayRun.FromString(left)
        endpoint = config.ApiAddress(found.socket, found.token, found.direct)
        accounts = {tag: dict(found.accounts[tag].by_key) for tag in self.made.tags}
        core, output = self._process(endpoint)
        recover(self._host.reactor, self._host.keeper, core, found.process)
        aliases, files = Aliases(found.aliased), Files.unpacked(found.files)
        api = Api(self._host.reactor, endpoint.socket, aliases)
        started = Started(self._host, self._core.sharing, core, api, files, aliases)
        bars = Bars(found.token, tuple(found.nesting), self._core.barred)
        run = XrayGeneration(started, self.made, endpoint, output, accounts, bars)
        output.connections.go_on(found)
        await started.require_answer()
        await run.find_barred()
        if not exact:
            await run.take_stock()
        return run

    @property
    def routing(self) -> Routing:
        return self.made.routing

    @property
    def rule_tags(self) -> frozenset[str]:
        return rules.tags_of(self.made.base)

    @property
    def balancers(self) -> Sequence[str]:
        return rules.balancers_of(self.made.base)

    async def rerouted(self, routing: Routing) -> XrayPlan:
        xray, reactor = await self._core.installation.current(self._chosen), self._host.reactor
        text = await starting.read(reactor, "".join(rule.text for rule in routing.added), rules.text_of, routing)
        touched = await starting.read(reactor, text, allowlist.touched, text, self._core.installation.paths)
        converted = await self._core.converted(xray, touched, text) if routing.added else b""
        reading = self.made, routing, converted, text, xray.number, Allowed.of(self._host)
        made = await starting.read(reactor, text, config.rerouted, *reading)
        return XrayPlan(self._core, made, self._touched, self._chosen)

    async def _rendered(
        self, endpoint: config.ApiAddress, target: Mapping[str, Accounts], first: bytes, aliases: Aliases
    ) -> bytes:
        rendering = config.render, self.made, endpoint, target, first, aliases
        return await starting.built(self._host.reactor, target, *rendering)

    def _new_api(self, xray: Executable) -> config.ApiAddress:
        token = secrets.token_hex(8)
        return config.ApiAddress(str(self._host.directory / f"{token}.sock"), token, xray.number >= DIRECT_API)

    def _process(self, endpoint: config.ApiAddress) -> tuple[CoreProcess, Output]:
        """A process that is not started yet, and what reads its output."""
        output = Output(endpoint, self.made.shown, Connections(self._host.reactor, self.made.ingress, self.made.tags))
        core = CoreProcess(self._host.reactor, self._host.log.extend, output.sift)
        core.when_exited().addCallback(lambda _: _remove_socket(Path(endpoint.socket)))
        return core, output


def is_refusal(core: CoreProcess) -> bool:
    """Whether a core exited because its configuration is invalid."""
    return core.exit is not None and core.exit.code == REFUSED


def _remove_socket(socket: Path) -> None:
    """Remove the API socket and its lock; Xray does so only on a clean exit."""
    for path in (socket, socket.with_name(socket.name + ".lock")):
        path.unlink(missing_ok=True)
