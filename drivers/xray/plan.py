"""A prepared configuration of Xray: check it with the core, launch it with users, recover a run of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drivers.process import readiness as starting
from drivers.process.allowlist import Allowed
from drivers.process.child import CoreProcess
from drivers.process.executable import Executable, Files
from drivers.process.kept import ANSWER, recover, silent
from drivers.process.planned import Planned
from drivers.process.shared import watch
from drivers.xray import config, files, reloading, rules
from drivers.xray.access import Shown
from drivers.xray.api import Api
from drivers.xray.compat import UntrustedProxy
from drivers.xray.connections import Connections
from drivers.xray.executable import files as read_by
from drivers.xray.generation import XrayGeneration
from drivers.xray.verdict import CONVERT, cause, is_refusal, look
from node.contract.accounts import Accounts
from node.contract.routing import Routing
from protos.handover_pb2 import XrayRun

# The first version whose api.listen may be a unix socket.
DIRECT_API = (26, 5, 3)
_FROM_PROTOBUF = ("-format", "protobuf", "-c", "stdin:")


class XrayPlan(Planned[config.Plan]):
    """Satisfies `node.contract.driver.Reroutable`."""

    async def check(self, target: Mapping[str, Accounts]) -> None:
        xray = await self._executable()
        message = await self._rendered(self._new_api(xray), target)
        await look(xray, "run", "-test", *_FROM_PROTOBUF, stdin=message)

    async def launch(self, target: Mapping[str, Accounts], seconds: float) -> XrayGeneration:
        # A copy: users change while the core starts.
        started = {tag: dict(accounts) for tag, accounts in target.items()}
        xray = await self._executable()
        endpoint, connections = self._new_api(xray), Connections(self._host.reactor, self.made.ingress)
        message = await self._rendered(endpoint, started)
        read = read_by(xray, reloading.are_reloaded(self.made.base))
        core, untrusted_proxy = self._process(endpoint, connections)
        xray.start(core, "run", *_FROM_PROTOBUF, contents={0: message})
        api = Api(self._host.reactor, endpoint.socket)
        watch(core, self._sharing)
        await self._ready(core, api, Path(endpoint.socket), seconds)
        run = XrayGeneration(
            self._host, self._sharing, self.made, core, api, endpoint, connections, started, read, untrusted_proxy
        )
        await self._led(run)
        return run

    def _process(self, endpoint: config.Endpoint, connections: Connections) -> tuple[CoreProcess, UntrustedProxy]:
        """A process that is not started yet, with the filter of its lines."""
        untrusted_proxy = UntrustedProxy()
        sifter = _sifter(endpoint, connections, self.made.shown, untrusted_proxy)
        core = CoreProcess(self._host.reactor, self._host.log.extend, sifter)
        core.when_exited().addCallback(lambda _: _remove_socket(Path(endpoint.socket)))
        return core, untrusted_proxy

    async def recover(self, left: bytes, exact: bool) -> XrayGeneration:
        found = XrayRun.FromString(left)
        endpoint = config.Endpoint(found.socket, found.token, found.direct)
        connections = Connections(self._host.reactor, self.made.ingress)
        accounts = {tag: dict(found.accounts[tag].by_key) for tag in self.made.tags}
        core, untrusted_proxy = self._process(endpoint, connections)
        recover(self._host.reactor, self._host.keeper, core, found.process)
        watch(core, self._sharing)
        api, files = Api(self._host.reactor, endpoint.socket), Files.unpacked(found.files)
        run = XrayGeneration(
            self._host, self._sharing, self.made, core, api, endpoint, connections, accounts, files, untrusted_proxy
        )
        connections.go_on(found)
        if not await run.answers(ANSWER):
            raise silent(core)
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
        xray, reactor = await self._installation.current(self._chosen), self._host.reactor
        text = await starting.read(reactor, "".join(rule.text for rule in routing.added), rules.text_of, routing)
        touched = await starting.read(reactor, text, files.asked, text, self._installation.paths)
        converted = b""
        if routing.added:
            converted = await self._installation.answered(
                xray, "convert", text.encode(), lambda: look(xray.touching(touched), *CONVERT, stdin=text.encode())
            )
        reading = self.made, routing, converted, text, xray.number, Allowed.of(self._host)
        made = await starting.read(reactor, text, config.rerouted, *reading)
        return XrayPlan(self._host, self._installation, self._sharing, made, self._touched, self._chosen)

    async def _led(self, run: XrayGeneration) -> None:
        """Override balancers by the API, since a configuration cannot. Kills the run if that fails."""
        try:
            await run.reroute(self)
        except BaseException:
            run.kill()
            await run.stop()
            raise

    async def _rendered(self, endpoint: config.Endpoint, target: Mapping[str, Accounts]) -> bytes:
        return await starting.built(self._host.reactor, target, config.render, self.made, endpoint, target)

    def _new_api(self, xray: Executable) -> config.Endpoint:
        token = secrets.token_hex(8)
        return config.Endpoint(str(self._host.directory / f"{token}.sock"), token, xray.number >= DIRECT_API)

    async def _ready(self, core: CoreProcess, api: Api, socket: Path, seconds: float) -> None:
        """Wait until the core answers. Raises `CoreFailed` with its last lines, after ending the process."""

        async def answers() -> bool:
            return socket.exists() and await api.ready(starting.CALL)

        try:
            await starting.ready(self._host.reactor, core, answers, seconds, is_refusal, cause)
        except BaseException:
            await api.close()
            raise


def _sifter(
    api: config.Endpoint, connections: Connections, shown: Shown, untrusted_proxy: UntrustedProxy
) -> Callable[[list[str]], list[str]]:
    """Filter the core's lines for the log: without those of the node's API connections, as the controller asked."""

    def sift(lines: list[str]) -> list[str]:
        kept = []
        for line in lines:
            if api.token in line:
                continue
            # Before `repeats`: an access line whose target has the core's warning in it must count, too.
            connections.take(line)
            if untrusted_proxy.repeats(line):
                continue
            if (text := shown.line(line)) is not None:
                kept.append(text)
        return kept

    return sift


def _remove_socket(socket: Path) -> None:
    """Remove the API socket and its lock; Xray does so only on a clean exit."""
    for path in (socket, socket.with_name(socket.name + ".lock")):
        path.unlink(missing_ok=True)
