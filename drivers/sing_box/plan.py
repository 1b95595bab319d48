"""A parsed sing-box configuration: have the core check it, launch it with users, or recover a running core."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from drivers.process import readiness as starting
from drivers.process.child import CoreProcess
from drivers.process.executable import Executable, Files
from drivers.process.kept import ANSWER, recover, silent
from drivers.process.planned import Planned
from drivers.process.ports import free_ports, is_open
from drivers.process.shared import watch
from drivers.sing_box import config
from drivers.sing_box.accounts import unlabelled
from drivers.sing_box.api import Api
from drivers.sing_box.detours import Detours
from drivers.sing_box.executable import counts
from drivers.sing_box.generation import SingBoxGeneration
from drivers.sing_box.verdict import STDIN, cause, is_refusal, look
from drivers.sockets.reuseport import is_of_knock
from node.base.errors import CoreFailed
from node.contract.accounts import Accounts
from protos.handover_pb2 import SingBoxRun

# The descriptor from which the core reads the file of live users, so that their keys are not in any directory.
_ROLL = 3


class SingBoxPlan(Planned[config.Plan]):
    """Satisfies `node.contract.driver.Plan`."""

    async def check(self, target: Mapping[str, Accounts]) -> None:
        core = await self._executable()
        await look(core, "check", stdin=await self._rendered(_endpoint(core, self.made), target))

    async def launch(self, target: Mapping[str, Accounts], seconds: float) -> SingBoxGeneration:
        # A copy: users change while the core starts.
        started = {tag: dict(accounts) for tag, accounts in target.items()}
        executable = await self._executable()
        endpoint = _endpoint(executable, self.made)
        executable = executable.touching(self._touched.listening(endpoint.ports))
        text = await self._rendered(endpoint, started, f"/proc/self/fd/{_ROLL}")
        roll = await starting.built(self._host.reactor, started, config.roll, self.made, endpoint, started)
        read = executable.reading()
        core = CoreProcess(self._host.reactor, self._host.log.extend, _sifter(endpoint))
        executable.start(core, "run", *STDIN, "-D", str(self._host.directory), contents={0: text, _ROLL: roll})
        watch(core, self._sharing)
        api = Api(self._host.reactor, endpoint, self.made.live, Detours(self.made.detours))
        await self._ready(core, api, endpoint, seconds)
        return SingBoxGeneration(self._host, self._sharing, self.made, core, api, endpoint, started, read)

    async def recover(self, left: bytes, exact: bool) -> SingBoxGeneration:
        found = SingBoxRun.FromString(left)
        ports = [getattr(found, name) if found.HasField(name) else None for name in ("stats_port", "users_port")]
        endpoint = config.Endpoint(found.port, found.secret, *ports)
        users = {tag: dict(found.configured[tag].by_key) for tag in self.made.tags}
        core = CoreProcess(self._host.reactor, self._host.log.extend, _sifter(endpoint))
        recover(self._host.reactor, self._host.keeper, core, found.process)
        watch(core, self._sharing)
        api = Api(self._host.reactor, endpoint, self.made.live, Detours(self.made.detours))
        api.go_on(found)
        files = Files.unpacked(found.files)
        run = SingBoxGeneration(self._host, self._sharing, self.made, core, api, endpoint, users, files)
        run.go_on(found, exact)
        if not await run.answers(ANSWER):
            raise silent(core)
        await api.begin()
        if not exact:
            await run.take_stock()
        return run

    async def _rendered(self, endpoint: config.Endpoint, target: Mapping[str, Accounts], roll: str = "") -> bytes:
        return await starting.built(self._host.reactor, target, config.render, self.made, endpoint, target, roll)

    async def _ready(self, core: CoreProcess, api: Api, endpoint: config.Endpoint, seconds: float) -> None:
        """Wait until the core answers. Raises as `starting.ready`; then the process has ended."""

        async def answers() -> bool:
            # A gRPC call is expensive for a check that is made this often, and takes processor time from the core.
            return is_open(endpoint.port) and await api.ready(starting.CALL)

        try:
            await starting.ready(self._host.reactor, core, answers, seconds, is_refusal, cause)
            await api.begin()
        except BaseException:
            try:
                await core.end()
            finally:
                await api.close()
            raise


def _endpoint(core: Executable, plan: config.Plan) -> config.Endpoint:
    try:
        return config.Endpoint.new(free_ports, counts(core), bool(plan.live))
    except OSError as error:
        raise CoreFailed(f"there is no port for the core's API: {error}") from error


def _sifter(endpoint: config.Endpoint) -> Callable[[list[str]], list[str]]:
    """Make a filter of the core's log lines.

    It drops lines that show the addresses or the secret of the APIs, and those about the node's own connections, and
    replaces labels by users' names. Lines about users' connections stay, whatever address they connect to.
    """
    where = "|".join(f"127\\.0\\.0\\.1:{port}" for port in endpoint.ports)
    telling = re.compile(rf"started at ({where})$|close tcp ({where}): use of closed")

    def is_ours(line: str) -> bool:
        if endpoint.secret in line or telling.search(line):
            return True
        return is_of_knock(line) and " connection to " not in line

    def sift(lines: list[str]) -> list[str]:
        return [unlabelled(line) for line in lines if not is_ours(line)]

    return sift
