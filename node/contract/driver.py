"""What a core's driver is to the node, and what the node hands it.

A new core brings a package with a class that satisfies `Driver`, plans that satisfy `Plan`, generations that satisfy
`Generation`, and an entry in `drivers.registry`. A driver launches what it is told to, when it is told to: when a run
ends and another one begins is the node's affair (`node.backend.replace`). What only some cores can do is a protocol of
its own (`CountsOnline`, `MeasuresLatency`, `Routes` with `Reroutable`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from twisted.internet.defer import Deferred

from node.contract.accounts import Account, Accounts, Change, Refusal
from node.contract.choices import Choices
from node.contract.counters import Reading, Scope
from node.contract.routing import Routing
from node.logs import Log
from node.reactor import Reactor
from protos.service_pb2 import (
    BackendStatsResponse,
    BalancerInfoResponse,
    Latency,
    RouteResult,
    RoutingRule,
    TestRouteRequest,
    User,
)

# How the line begins that says why; a stack trace may follow it.
_TELLING = ("panic:", "fatal error:", "Failed to start:", "FATAL")


@dataclass(frozen=True)
class Host:
    """What a driver is given: the reactor, a private directory (0700), the ring, its settings.

    `withheld` are files and directories that no core reads, whatever else it may. `choices` may change.
    """

    reactor: Reactor
    log: Log
    directory: Path
    settings: Mapping[str, str]
    withheld: Sequence[Path] = ()
    choices: Choices = field(default_factory=Choices)


@dataclass(frozen=True)
class Exit:
    """How a core's process ended: its exit code, or the negative signal, and its last lines."""

    code: int
    lines: tuple[str, ...]

    @property
    def kind(self) -> str:
        """One word, for counting."""
        return "signal" if self.code < 0 else "exit"

    @property
    def how(self) -> str:
        return f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"

    @property
    def reason(self) -> str:
        """One line for an operator."""
        telling = [line for line in self.lines if line.startswith(_TELLING)] or self.lines
        return f"the core ended by itself ({self.how})" + (f": {telling[-1]}" if telling else "")


class Applied(NamedTuple):
    """What became of a batch of changes: whom the core refused, and which changes are left for another run of it."""

    refused: list[Refusal]
    left: list[Change]


class Generation(Protocol):
    """One run of a core."""

    @property
    def alive(self) -> bool:
        """The process runs and answered once."""

    @property
    def accounts(self) -> Mapping[str, Accounts]:
        """Per managed inbound, what the core confirmed."""

    @property
    def warnings(self) -> Sequence[str]:
        """What an operator should know about this run now: files that changed since it began, for instance."""

    @property
    def outdated(self) -> bool:
        """Whether its executable, or a file that it read when it started, is another one on disk by now."""

    @property
    def uncounted(self) -> frozenset[Scope]:
        """What this run cannot count; asked for, it is unsupported."""

    def when_exited(self) -> Deferred[Exit]:
        """Fires when the process is gone; a Deferred of its own for each caller."""

    async def apply(self, changes: Sequence[Change]) -> Applied:
        """Change users while the core runs, all removals before all additions; called for one batch at a time.

        What the core did not confirm is refused, by name, and not in `accounts`. What it cannot do while it runs, or
        only at a higher cost than by another run, is left, undone. Raises `errors.CoreFailed`.
        """

    async def audit(self) -> int:
        """Compare the core's own list of users with `accounts`, and make `accounts` tell the truth.

        Returns in how many users they differed. Raises `errors.CoreFailed`.
        """

    async def counters(self) -> Reading:
        """All counters, cumulative since this process began, but those of the node's own inbounds and outbounds.

        Inbounds and outbounds that carried nothing yet are among them with 0. Never resets. Raises `errors.CoreFailed`.
        """

    async def online(self, key: str) -> Mapping[str, int]:
        """A user's addresses and when each was last seen (Unix seconds); empty when offline or unknown.

        Raises `errors.Unsupported` where the core does not tell, and `errors.CoreFailed`.
        """

    async def backend_stats(self) -> BackendStatsResponse:
        """The core's own run-time figures. Raises `errors.CoreFailed`."""

    async def answers(self, seconds: float) -> bool:
        """Whether the core answers a small question within this time."""

    async def wind_down(self) -> None:
        """Take no more connections and end the live ones: after it the counters come to rest, and can still be read.

        Returns when the core has had the moment that it needs to notice; then two equal readings are the last ones.
        What cannot be done is logged: the process ends soon anyway.
        """

    async def stop(self) -> None:
        """End the process: asked, then forced. Returns when it is gone. May be called again meanwhile."""

    def kill(self) -> None:
        """End the process at once: it does not answer any more."""


@runtime_checkable
class CountsOnline(Protocol):
    """A generation that can tell how many addresses a user has where it does not tell which."""

    async def online_count(self, key: str) -> int:
        """How many addresses a user is connected from. Raises as `Generation.online`."""


@runtime_checkable
class Cuts(Protocol):
    """A generation that counts the connections of removed users that it has ended."""

    @property
    def cut(self) -> int:
        """How many so far."""


@runtime_checkable
class Accepts(Protocol):
    """A generation that can tell whether its inbounds still accept TCP connections, without making one."""

    async def deaf(self) -> Sequence[str]:
        """Where none is accepted, each in a line. Raises `errors.CoreFailed` if that cannot be known."""


@runtime_checkable
class Closes(Generation, Protocol):
    """A generation whose inbounds can be closed to new connections while those that it has go on."""

    @property
    def open_ports(self) -> Sequence[int]:
        """Where users get in all the same, by UDP: their datagrams do not tell who is new."""

    async def close_door(self, *, empty: bool = False) -> None:
        """Take no new TCP connections, at listeners that are new since the last call, too; whoever joins it neither.

        With `empty` those that it has end: somebody may have come before. Raises `errors.CoreFailed`.
        """

    async def open_door(self) -> None:
        """Take new connections again. Raises `errors.CoreFailed`."""


@runtime_checkable
class HasProcess(Protocol):
    """A generation that is one process."""

    @property
    def pid(self) -> int | None:
        """The process number while it runs."""


@runtime_checkable
class CountsSome(Protocol):
    """A generation that can tell of a few names what they have counted, at a fraction of the cost of all."""

    async def some_counters(self, names: Iterable[tuple[Scope, str]]) -> Reading:
        """At least the counters of these that it has; as `Generation.counters` otherwise, and raises as that."""


@runtime_checkable
class MeasuresLatency(Protocol):
    """A generation that can tell how far away outbounds are."""

    async def latency(self) -> Sequence[Latency]:
        """What was measured last, in any order; an outbound that was not tried yet may be missing.

        Raises `errors.Unsupported`, with what to add, where the configuration measures none, and `errors.CoreFailed`.
        """


@runtime_checkable
class Lingers(Protocol):
    """A generation that may keep removed users out without forgetting their credentials."""

    @property
    def lingering(self) -> bool:
        """Whether it knows a credential that is not valid any more: another run would not."""


@runtime_checkable
class Routes(Generation, Protocol):
    """A generation that can tell of its routing, and change it. The node's own rules are no part of it."""

    async def reroute(self, plan: Plan) -> None:
        """Have the rules, and the targets of balancers, of this plan, which is one of its configuration.

        New rules come before old ones go. Raises `errors.InvalidConfig` for one that the core refuses, and
        `errors.CoreFailed`: then it may have some of it.
        """

    async def rules(self) -> Sequence[RoutingRule]:
        """In their order. Raises `errors.Unsupported` where the core does not list them, and `errors.CoreFailed`."""

    async def balancer(self, tag: str) -> BalancerInfoResponse:
        """Raises `errors.UnknownName` and `errors.CoreFailed`."""

    async def test_route(self, request: TestRouteRequest) -> RouteResult:
        """Which way a connection would take. Raises `errors.InvalidRequest` and `errors.CoreFailed`."""


class NotShared(Exception):
    """A run cannot share its listeners with another one. The text says why, for an operator."""


@runtime_checkable
class Shares(Generation, Protocol):
    """A generation that can share its listeners with another run of its core, so that a change drops nobody.

    The run that serves joins before the next one is launched, and the next one when it answers. New connections go to
    the run that was `led` to last, at first to the one that joined first; each run keeps the connections that it has.
    A run that ends leaves by itself, and what it was given goes to the newest of the others.
    """

    @property
    def pid(self) -> int | None:
        """The process number while it runs."""

    @property
    def ends_sessions(self) -> bool:
        """Whether some clients have sessions with it by UDP, which end when another run takes over."""

    async def obstacles(self, plan: Plan) -> Sequence[str]:
        """Why a run of this plan could not take over from this one, each in a line; nothing is touched."""

    async def join(self) -> None:
        """Share the listeners from now on; nobody is given to the run by that. Raises `NotShared`."""

    async def prove(self, seconds: float) -> None:
        """Have it accept a TCP connection on every inbound. Raises `errors.CoreFailed` if it does not in time."""

    async def lead(self) -> None:
        """Give it all new connections; clients of inbounds that it does not have get no answer. Raises `NotShared`.

        Sessions by UDP end in a short moment in which clients are told that nobody is there, and begin anew with it.
        """

    async def connected(self) -> int:
        """How many connections it has, with those that wait for it."""


class NotNow(Exception):
    """What runs cannot be left at this moment; later it can. The text says why."""


class Gone(Exception):
    """The run that was left has ended meanwhile. The text says how."""


@dataclass(frozen=True)
class Left:
    """A run that the node's next program goes on with: its process number, and what its driver has to know of it.

    `descriptors`, of those that are named in `packed`, stay open.
    """

    pid: int
    descriptors: Sequence[int]
    packed: bytes


@runtime_checkable
class Leaves(Generation, Protocol):
    """A generation that can be left to the next program of the node, which is the same process to the kernel."""

    async def leave(self) -> Left:
        """Hear no more of it: what it says waits for the next program. Raises `errors.CoreFailed`."""

    def stay(self) -> None:
        """It was not left after all."""


@runtime_checkable
class LivesOn(Leaves, Protocol):
    """A generation that another node can go on with where this one is killed."""

    @property
    def handle(self) -> Left | None:
        """What that one needs, as long as the run lives: for `Recovers.recover`. None where it cannot."""


@runtime_checkable
class Recovers(Protocol):
    """A plan of a core that leaves its runs: see `Leaves`."""

    async def recover(self, left: bytes) -> Leaves:
        """The run that an earlier program left, of this very configuration. Raises `Gone` and `errors.CoreFailed`.

        What it says is not heard until it is told to `stay`: until then it can go back to that program.
        """


@dataclass(frozen=True)
class Together:
    """What a driver has of all its runs together, for the node's next program. `descriptors` stay open."""

    packed: bytes
    descriptors: Sequence[int]


class Heirs(Protocol):
    """Is told what becomes of the cores that the last version has left."""

    def taken(self, pids: Collection[int]) -> None:
        """These are this version's from here on. Any other one has ended when this returns."""

    def go_back(self, reason: str) -> None:
        """One of them cannot be: they go back to the last version. Returns where there is none to go back to."""

    def failed(self, reason: str) -> None:
        """None of them can be: they go back to the last version, or have ended when this returns."""


class Plan(Protocol):
    """A configuration that the core accepted, without its users: ready to be launched, again and again."""

    @property
    def tags(self) -> Sequence[str]:
        """The managed inbounds, those whose users are the supplied ones."""

    @property
    def warnings(self) -> Sequence[str]:
        """What an operator should know about this configuration."""

    def account(self, tag: str, user: User) -> Account | None:
        """The user's account for a managed inbound; None without a credential. Pure. Raises `Unusable`."""

    def alike(self, other: Plan) -> bool:
        """Whether both have the same managed inbounds, with the same accounts for every user."""

    async def check(self, target: Mapping[str, Accounts]) -> None:
        """Have the core build everything with these users, and bind nothing: the second, dearer half of the check.

        Raises `errors.InvalidConfig`, or `errors.CoreFailed` where the core could not say.
        """

    async def launch(self, target: Mapping[str, Accounts], seconds: float) -> Generation:
        """Run the core with these users. Returns when it answers, within `seconds`; else no process is left.

        Raises `errors.PortTaken` for a port that it cannot have now, `errors.CoreFailed`, or `errors.InvalidConfig`
        where only the start itself can tell.
        """


@runtime_checkable
class Reroutable(Plan, Protocol):
    """A plan whose rules and balancers can be changed while a core runs it."""

    @property
    def routing(self) -> Routing:
        """What was changed of them, with the tags of the rules that were added."""

    @property
    def rule_tags(self) -> Collection[str]:
        """The tags of the rules that there are by now."""

    @property
    def balancers(self) -> Collection[str]:
        """The tags of its balancers."""

    async def rerouted(self, routing: Routing) -> Reroutable:
        """The plan with these changes. To be asked of the plan as it was prepared.

        Raises `errors.InvalidConfig` and `errors.InvalidRequest` for rules that cannot be, `errors.UnknownName` for an
        outbound or a balancer that is not there.
        """


class Driver(Protocol):
    """A kind of core."""

    @property
    def name(self) -> str:
        """The core's name, as in BaseInfoResponse.core_type."""

    def fingerprint(self, config_text: str) -> str:
        """Equal for configurations that mean the same: order of keys, white space and comments do not count. Pure."""

    async def version(self) -> str:
        """The version of the executable. Raises `errors.CoreFailed` with what to do if there is none."""

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> Plan:
        """Have the core read a configuration, touching none that runs. Raises `errors.InvalidConfig`."""


@runtime_checkable
class LeavesAll(Driver, Protocol):
    """A driver of a core that leaves its runs: see `Leaves`."""

    def rehearse(self, begin: bool) -> None:
        """Keep what the executable answers from here on, or no more: the next program would ask the same again."""

    async def leave(self) -> Together:
        """What it has of all its runs together, when these have been left."""

    def go_on(self, packed: bytes) -> None:
        """Go on where an earlier program ended; before a run is recovered. Raises `errors.CoreFailed`."""

    async def regain(self, runs: Sequence[Generation]) -> None:
        """Go on with runs of a node that was killed, oldest first; the last one is the current one.

        After they are recovered. Raises `errors.CoreFailed`.
        """

    def remain(self, pids: Collection[int]) -> None:
        """Of the runs that were left these live, and are recovered; the others have ended."""
