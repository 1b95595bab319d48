"""The sing-box driver: has the core parse and check a configuration, launches it with users, recovers a run of it."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from drivers.install.releases import SING_BOX
from drivers.process import starting
from drivers.process.aliases import Aliases
from drivers.process.allowlist import Allowed
from drivers.process.child import CoreProcess
from drivers.process.closed import Closed
from drivers.process.executable import Executable, Files, Installation
from drivers.process.generation import Started
from drivers.process.kept import recover
from drivers.process.plan import CoreDriver, CorePlan
from drivers.sing_box import allowlist, config
from drivers.sing_box.abuse import LINES
from drivers.sing_box.accounts import unlabelled
from drivers.sing_box.api import Api
from drivers.sing_box.generation import SingBoxGeneration
from drivers.sing_box.table import Detours
from drivers.sockets.reuseport import is_of_knock
from node.base.errors import CoreFailed
from node.contract.accounts import Accounts
from node.contract.driver import Host
from protos.handover_pb2 import SingBoxRun

# The first version with the api service.
OLDEST = (1, 14)
# The descriptor from which the core reads the file of live users, so that their keys are not in any directory.
_ROLL = 3
STDIN = ("-c", "stdin", "--disable-color")
# How the errors begin that blame the configuration, during a check or a start (`cmd/sing-box/cmd_run.go`), …
# (Groups of outbounds do not depend on the machine.)
_GROUP = r"start service: start outbound(?:: start endpoint)?/(?:selector|urltest)\["
_AT_FAULT = re.compile(rf"decode config|create service:|{_GROUP}|.* not found")
# … and words in such errors that blame the machine all the same.
_PASSING = ("address already in use", "cannot assign requested address", "permission denied")
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LAST = 65535
# The least number of ports above the kernel's range for them to be used.
ROOM = 256


class SingBox(CoreDriver):
    """Satisfies `node.contract.driver.Driver`."""

    name = "sing-box"
    verdict = re.compile(r"FATAL\[\d+\] (.*)")

    def __init__(self, host: Host) -> None:
        super().__init__(Installation(host, SING_BOX, oldest=OLDEST))

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> SingBoxPlan:
        chosen, reactor = self.installation.chosen, self.host.reactor
        core, text = await self.installation.current(chosen), config_text.encode()
        output = await self.installation.answered(
            core, "format", text, lambda: self.look(core, "format", *STDIN, stdin=text, output=1)
        )
        reading = (
            config.plan,
            output,
            exclude,
            self.host.directory,
            counts(core),
            Allowed.of(self.host),
            self.host.abuse,
            Closed.of(self.host),
        )
        made = await starting.read(reactor, config_text, *reading)
        naming = allowlist.touched, made.tree, self.installation.paths, core.unconfined
        touched = await starting.read(reactor, config_text, *naming)
        return SingBoxPlan(self, made, touched, chosen)

    @staticmethod
    def cause(lines: Sequence[str]) -> str:
        fatal = [match[1] for line in lines if (match := SingBox.verdict.search(line))]
        return starting.last(fatal or [line for line in lines if line.strip()])


class SingBoxPlan(CorePlan[SingBox, config.Plan]):
    """Satisfies `node.contract.driver.Plan`."""

    async def check(self, target: Mapping[str, Accounts]) -> None:
        core = await self._executable()
        await self._core.look(
            core, "check", *STDIN, stdin=await self._rendered(_endpoint(core, self.made), target, "", self._aliases)
        )

    async def launch(self, target: Mapping[str, Accounts], seconds: float) -> SingBoxGeneration:
        # A copy: users change while the core starts.
        users = {tag: dict(accounts) for tag, accounts in target.items()}
        executable = await self._executable()
        endpoint = _endpoint(executable, self.made)
        executable = executable.touching(self._touched.listening(endpoint.ports))
        aliases = self._aliases
        text = await self._rendered(endpoint, users, f"/proc/self/fd/{_ROLL}", aliases)
        roll = await starting.built(self._host.reactor, users, config.roll, self.made, endpoint, users, aliases)
        read = executable.reading()
        core = CoreProcess(self._host.reactor, self._host.log.extend, _sifter(endpoint, self.made.abuse.blocks))
        executable.start(core, "run", *STDIN, "-D", str(self._host.directory), contents={0: text, _ROLL: roll})
        started = Started(self._host, self._core.sharing, core, self._api(endpoint), read, aliases)
        # A gRPC call is expensive for a check that is made this often, and takes processor time from the core.
        await started.ready(lambda: is_open(endpoint.port), seconds, is_refusal, self._core.cause)
        started.api.begin()
        return SingBoxGeneration(started, self.made, endpoint, users)

    async def recover(self, left: bytes, exact: bool) -> SingBoxGeneration:
        found = SingBoxRun.FromString(left)
        ports = [getattr(found, name) if found.HasField(name) else None for name in ("stats_port", "users_port")]
        endpoint = config.ApiAddress(found.port, found.secret, *ports)
        users = {tag: dict(found.configured[tag].by_key) for tag in self.made.tags}
        core = CoreProcess(self._host.reactor, self._host.log.extend, _sifter(endpoint, self.made.abuse.blocks))
        recover(self._host.reactor, self._host.keeper, core, found.process)
        files, aliases = Files.unpacked(found.files), Aliases(found.aliased)
        started = Started(self._host, self._core.sharing, core, self._api(endpoint), files, aliases)
        started.api.go_on(found)
        run = SingBoxGeneration(started, self.made, endpoint, users)
        run.go_on(found, exact)
        await started.require_answer()
        started.api.begin()
        if not exact:
            await run.take_stock()
        return run

    def _api(self, endpoint: config.ApiAddress) -> Api:
        return Api(self._host.reactor, endpoint, self.made.live, Detours(self.made.detours))

    async def _rendered(
        self, endpoint: config.ApiAddress, target: Mapping[str, Accounts], roll: str, aliases: Aliases
    ) -> bytes:
        rendering = config.render, self.made, endpoint, target, roll, aliases
        return await starting.built(self._host.reactor, target, *rendering)


def counts(executable: Executable) -> bool:
    """Whether the executable was built with v2ray_api, whose counters are exact."""
    tags = next((line.removeprefix("Tags: ") for line in executable.lines if line.startswith("Tags: ")), "")
    return "with_v2ray_api" in tags.split(",")


def _endpoint(core: Executable, plan: config.Plan) -> config.ApiAddress:
    try:
        return config.ApiAddress.new(free_ports, counts(core), bool(plan.live))
    except OSError as error:
        raise CoreFailed(f"there is no port for the core's API: {error}") from error


def is_refusal(core: CoreProcess) -> bool:
    """Whether a core that exited refused its configuration.

    The exit code is 1 for any cause, such as a rule set that could not be fetched, so its last lines decide.
    """
    said = SingBox.cause(core.last_lines)
    at_fault = _AT_FAULT.match(said) and not any(words in said for words in _PASSING)
    return core.exit is not None and core.exit.code == 1 and bool(at_fault)


def _sifter(endpoint: config.ApiAddress, blocks: bool) -> Callable[[list[str]], list[str]]:
    """Make a filter of the core's log lines.

    It drops lines that show the addresses or the secret of the APIs, and those about the node's own connections and, if
    there are any (`blocks`), outbounds; and it replaces labels by users' names. Lines about users' connections stay,
    whatever address they connect to.
    """
    where = "|".join(f"127\\.0\\.0\\.1:{port}" for port in endpoint.ports)
    telling = re.compile(rf"started at ({where})$|close tcp ({where}): use of closed")

    def is_ours(line: str) -> bool:
        if endpoint.secret in line or telling.search(line) or (blocks and LINES.search(line)):
            return True
        return is_of_knock(line) and " connection to " not in line

    def sift(lines: list[str]) -> list[str]:
        return [unlabelled(line) for line in lines if not is_ours(line)]

    return sift


def is_open(port: int) -> bool:
    """Whether something listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        # A listener that does not accept must not block the node.
        probe.settimeout(0.02)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    """Return random free ports of 127.0.0.1, above the kernel's range for outgoing connections if there is room.

    Raises `OSError` if there are none.
    """
    lowest, highest = map(int, _RANGE.read_text().split())
    span = range(highest + 1, _LAST + 1) if _LAST - highest >= ROOM else range(lowest, _LAST + 1)
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.sample(span, len(span)):
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError("no port of 127.0.0.1 is free")
