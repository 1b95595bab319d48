"""The protocols of a core's driver, and what the node gives it.

A driver is a package with a class that satisfies `Driver`, plans that satisfy `Plan`, generations that satisfy
`Generation`, and an entry in `drivers.registry`. The node decides when a run starts and ends (`node.backend.replace`);
the driver only carries it out. Abilities that only some cores have are protocols of their own (`CountsOnline`,
`MeasuresLatency`, `Routes` with `Reroutable`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from twisted.internet.defer import Deferred

from node.base.logs import Log
from node.base.reactor import Reactor
from node.contract.accounts import Account, Accounts, Change, Refusal
from node.contract.choices import Choices
from node.contract.counters import Reading, Scope
from node.contract.keeper import Keeper
from node.contract.routing import Routing
from protos.service_pb2 import (
    BackendStatsResponse,
    BackendType,
    BalancerInfoResponse,
    Latency,
    RouteResult,
    RoutingRule,
    TestRouteRequest,
    User,
)

# Prefixes of the lines in which cores report why they end. Other lines may contain data of users.
_FATAL = ("panic:", "fatal error:", "Failed to start:", "FATAL")


@dataclass(frozen=True)
class Host:
    """What a driver gets from the node: the reactor, the ring, a private directory (0700), its settings.

    `withheld`: files and directories that no core may read. `choices` may change while the node runs. `keeper` has what
    outlives the node.
    """

    reactor: Reactor
    log: Log
    directory: Path
    settings: Mapping[str, str]
    withheld: Sequence[Path] = ()
    choices: Choices = field(default_factory=Choices)
    keeper: Keeper = field(default_factory=Keeper)


@dataclass(frozen=True)
class Exit:
    """How a core's process ended: its exit code, or the negated signal number, and its last lines."""

    code: int
    lines: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The kind of exit, for metrics: "signal" or "exit"."""
        return "signal" if self.code < 0 else "exit"

    @property
    def how(self) -> str:
        return f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"

    @property
    def reason(self) -> str:
        """One line for an operator, without data of users. A killed core has no last words."""
        fatal = fatal_lines(self.lines) if self.code >= 0 else []
        return f"the core ended unexpectedly ({self.how})" + (f": {fatal[-1]}" if fatal else "")


@dataclass(frozen=True)
class Done(Exit):
    """How a command ended: its exit, last lines and output."""

    output: bytes


def fatal_lines(lines: Iterable[str]) -> list[str]:
    """The lines in which a core reports why it ends. Other lines may contain a user's e-mail or address."""
    return [line for line in lines if line.startswith(_FATAL)]


class Applied(NamedTuple):
    """The outcome of a batch of changes: the refused users, and the changes left for another run."""

    refused: list[Refusal]
    left: list[Change]


class Generation(Protocol):
    """One run of a core."""

    @property
    def alive(self) -> bool:
        """Whether the process runs, after it has answered once."""

    @property
    def accounts(self) -> Mapping[str, Accounts]:
        """The accounts that the core has confirmed, by managed inbound."""

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings for the operator about this run now: files that changed since it began, for instance."""

    @property
    def outdated(self) -> bool:
        """Whether its executable, or a file that it read when it started, has changed on disk."""

    @property
    def uncounted(self) -> frozenset[Scope]:
        """The scopes that this run cannot count: a request for them is `errors.Unsupported`."""

    def when_exited(self) -> Deferred[Exit]:
        """Fires when the process is gone. Each caller gets a Deferred of its own."""

    async def apply(self, changes: Sequence[Change]) -> Applied:
        """Change users while the core runs, all removals before all additions. Called for one batch at a time.

        Changes that the core does not confirm are refused, by user, and are not in `accounts`. Changes that it cannot
        make while it runs, or only at a higher cost than a new run, are left undone. Raises `errors.CoreFailed`.
        """

    async def audit(self) -> int:
        """Compare the core's own list of users with `accounts`, and correct `accounts`.

        Returns the number of users that differed. Raises `errors.CoreFailed`.
        """

    async def counters(self) -> Reading:
        """All counters, cumulative since this process began, except those of the node's own inbounds and outbounds.

        Inbounds and outbounds without traffic are included with 0. Never resets. Raises `errors.CoreFailed`.
        """

    async def online(self, key: str) -> Mapping[str, int]:
        """A user's addresses and when each was last seen (Unix seconds); empty if offline or unknown.

        Raises `errors.Unsupported` if the core does not track addresses, and `errors.CoreFailed`.
        """

    async def backend_stats(self) -> BackendStatsResponse:
        """The core's own runtime statistics. Raises `errors.CoreFailed`."""

    async def answers(self, seconds: float) -> bool:
        """Whether the core answers a small request within these seconds."""

    async def wind_down(self) -> None:
        """Take no more connections and end the live ones, so that the counters come to rest; they can still be read.

        Returns when the core has had time to notice; after that two equal readings are final. Failures are only logged:
        the process ends soon anyway.
        """

    async def stop(self) -> None:
        """End the process, by force if it does not end when asked. Returns when it is gone. May be called again."""

    def kill(self) -> None:
        """Kill the process at once."""


@runtime_checkable
class CountsOnline(Protocol):
    """A generation that can count a user's addresses even if it cannot list them."""

    async def online_count(self, key: str) -> int:
        """The number of addresses that a user is connected from. Raises as `Generation.online`."""


@runtime_checkable
class Cuts(Protocol):
    """A generation that counts the connections of removed users that it has cut."""

    @property
    def cut(self) -> int:
        """The number so far."""


@runtime_checkable
class Accepts(Protocol):
    """A generation that can check whether its inbounds still accept TCP connections, without making one."""

    async def deaf(self) -> Sequence[str]:
        """The inbounds that accept none, a line each. Raises `errors.CoreFailed` if that cannot be known."""


@runtime_checkable
class Closes(Generation, Protocol):
    """A generation whose inbounds can be closed to new connections while existing ones go on."""

    @property
    def open_ports(self) -> Sequence[int]:
        """UDP ports that stay open: a datagram does not show whether its sender is new."""

    async def close_door(self, *, empty: bool = False) -> None:
        """Take no new TCP connections, also at listeners opened since the last call, and in runs that join it later.

        With `empty` existing connections end, too: some may have come before the call. Raises `errors.CoreFailed`.
        """

    async def open_door(self) -> None:
        """Take new connections again. Raises `errors.CoreFailed`."""


@runtime_checkable
class HasProcess(Protocol):
    """A generation that is one process."""

    @property
    def pid(self) -> int | None:
        """The PID while it runs."""


@runtime_checkable
class CountsSome(Protocol):
    """A generation that can read the counters of a few names at a fraction of the cost of all."""

    async def some_counters(self, names: Iterable[tuple[Scope, str]]) -> Reading:
        """At least the counters of these names, as far as they exist. Otherwise as `Generation.counters`."""


@runtime_checkable
class MeasuresLatency(Protocol):
    """A generation that measures the latency of outbounds."""

    async def latency(self) -> Sequence[Latency]:
        """The newest measurements, in any order; an outbound that was not measured yet may be missing.

        Raises `errors.Unsupported`, with what to add, if the configuration measures none, and `errors.CoreFailed`.
        """


@runtime_checkable
class Lingers(Protocol):
    """A generation that may keep removed users out without forgetting their credentials."""

    @property
    def lingering(self) -> bool:
        """Whether it still knows credentials of removed users, which a new run would not."""


@runtime_checkable
class Routes(Generation, Protocol):
    """A generation that can report and change its routing. The node's own rules are not part of it."""

    async def reroute(self, plan: Plan) -> None:
        """Apply the rules, and the targets of balancers, of this plan of the same configuration.

        New rules are added before old ones are removed. Raises `errors.InvalidConfig` for a rule that the core refuses,
        and `errors.CoreFailed`: part of the changes may be in force then.
        """

    async def rules(self) -> Sequence[RoutingRule]:
        """The rules, in order. Raises `errors.Unsupported` if the core cannot list them, and `errors.CoreFailed`."""

    async def balancer(self, tag: str) -> BalancerInfoResponse:
        """The state of a balancer. Raises `errors.UnknownName` and `errors.CoreFailed`."""

    async def test_route(self, request: TestRouteRequest) -> RouteResult:
        """The route that a connection would take. Raises `errors.InvalidRequest` and `errors.CoreFailed`."""


class NotShared(Exception):
    """A run cannot share its listeners with another one; the text has the reason, for an operator."""


@runtime_checkable
class Shares(Generation, Protocol):
    """A generation that can share its listeners with another run of its core, so that a change ends no connection.

    The serving run joins before the next one is launched, and the next one when it answers. New connections go to the
    run on which `lead` was called last, at first to the one that joined first; each run keeps its existing connections.
    When a run ends, the newest of the others gets its new connections.
    """

    @property
    def pid(self) -> int | None:
        """The PID while it runs."""

    @property
    def ends_sessions(self) -> bool:
        """Whether clients have UDP sessions with it, which end when another run takes over."""

    async def obstacles(self, plan: Plan) -> Sequence[str]:
        """Why a run of this plan could not take over from this one, a line each. Changes nothing."""

    async def join(self) -> None:
        """Share the listeners from now on; the run gets no connections by that yet. Raises `NotShared`."""

    async def prove(self, seconds: float) -> None:
        """Have it accept a TCP connection on every inbound. Raises `errors.CoreFailed` if it does not in time."""

    async def lead(self) -> None:
        """Direct all new connections to it; clients of inbounds that it lacks get no answer. Raises `NotShared`.

        UDP sessions end: for a short moment clients get "port unreachable" (ICMP), then they begin again.
        """

    async def connected(self) -> int:
        """The number of its connections, with those in its backlogs."""


class NotNow(Exception):
    """The runs cannot be handed over at this moment, but later; the text has the reason."""


class Gone(Exception):
    """The handed-over run has ended meanwhile; the text has the reason."""


@runtime_checkable
class Leaves(Generation, Protocol):
    """A generation whose core the next node can go on with."""

    async def leave(self) -> None:
        """Stop reading its output, which waits for the next node. Raises `errors.CoreFailed`."""

    @property
    def counts_in_node(self) -> bool:
        """Whether the node adds up its counters: what it has added since `packed` ends with a node that is killed."""

    def packed(self, exact: bool) -> bytes:
        """What the next node needs to go on with it, for `Recovers.recover`. Raises `errors.CoreFailed`.

        `exact`: after `leave`, all of it. Otherwise what the next node can find out, if slowly, is left out.
        """

    def stay(self) -> None:
        """Read its output again: the hand-over did not happen, or is complete."""


@runtime_checkable
class Recovers(Protocol):
    """A plan of a core whose runs can be handed over: see `Leaves`."""

    async def recover(self, left: bytes, exact: bool) -> Leaves:
        """Take over a handed-over run of this very configuration. Raises `Gone` and `errors.CoreFailed`.

        `exact`: as in `Leaves.packed`. Its output is not read until `stay` is called.
        """


class Heirs(Protocol):
    """Called with the outcome of recovering the cores that the previous version handed over."""

    async def end_others(self) -> None:
        """No other core can be taken over: those that were not have ended when this returns. Only after a kill."""

    def taken(self, pids: Collection[int]) -> None:
        """This node has taken over these cores."""

    def go_back(self, reason: str) -> None:
        """A core cannot be taken over: go back to the previous version. Returns if there is none."""

    def failed(self, reason: str) -> None:
        """No core can be taken over: go back to the previous version, else all have ended when this returns."""


class Plan(Protocol):
    """A configuration that the core accepted, without users; it can be launched any number of times."""

    @property
    def tags(self) -> Sequence[str]:
        """The managed inbounds: those that get the supplied users."""

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings for the operator about this configuration."""

    def account(self, tag: str, user: User) -> Account | None:
        """The user's account for a managed inbound; None without a credential. Pure. Raises `Unusable`."""

    def same_credential(self, one: bytes, other: bytes) -> bool:
        """Whether two accounts of a user have the same credential; the spelling of the e-mail may differ. Pure."""

    def alike(self, other: Plan) -> bool:
        """Whether both have the same managed inbounds, with the same accounts for every user."""

    async def check(self, target: Mapping[str, Accounts]) -> None:
        """Have the core build everything with these users without binding ports: the expensive half of the check.

        Raises `errors.InvalidConfig`, or `errors.CoreFailed` if the core reached no verdict.
        """

    async def launch(self, target: Mapping[str, Accounts], seconds: float) -> Generation:
        """Start the core with these users. Returns when it answers, within `seconds`; else no process is left.

        Raises `errors.PortTaken` for a port that it cannot bind now, `errors.CoreFailed`, or `errors.InvalidConfig` for
        faults that only show at the start itself.
        """


@runtime_checkable
class Reroutable(Plan, Protocol):
    """A plan whose rules and balancers can be changed while a core runs it."""

    @property
    def routing(self) -> Routing:
        """The routing changes, with the tags of the added rules."""

    @property
    def rule_tags(self) -> Collection[str]:
        """The tags of the current rules."""

    @property
    def balancers(self) -> Collection[str]:
        """The tags of its balancers."""

    async def rerouted(self, routing: Routing) -> Reroutable:
        """A copy of the plan with these changes. Call it on the plan as it was prepared.

        Raises `errors.InvalidConfig` and `errors.InvalidRequest` for invalid rules, `errors.UnknownName` for an unknown
        outbound or balancer.
        """


class Driver(Protocol):
    """A kind of core."""

    @property
    def name(self) -> str:
        """The core's name, as in BaseInfoResponse.core_type."""

    def fingerprint(self, config_text: str) -> str:
        """A text that is equal for configurations with equal meaning: key order, white space and comments do not count.

        Pure.
        """

    async def version(self) -> str:
        """The version of the executable. Raises `errors.CoreFailed` with what to do if there is none."""

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> Plan:
        """Have the core parse a configuration; running cores are not touched. Raises `errors.InvalidConfig`."""


@runtime_checkable
class LeavesAll(Driver, Protocol):
    """A driver of a core whose runs can be handed over: see `Leaves`."""

    def rehearse(self, begin: bool) -> None:
        """Begin or end keeping the executable's answers, for the next program, which would ask the same again."""

    async def leave(self) -> bytes:
        """What all runs share, to be handed over after the runs themselves; their sockets are with the keeper."""

    def go_on(self, packed: bytes) -> None:
        """Take over what `leave` returned, if anything; before a run is recovered. Raises `errors.CoreFailed`."""

    async def remain(self, pids: Collection[int], lead: int | None) -> None:
        """Note which runs are recovered and live; the others have ended. Raises `errors.CoreFailed`.

        `lead`: the run that new connections are directed to again; None after an exact hand-over.
        """


def type_name(number: int) -> str:
    """Return the name of a backend type with its number, or the number alone."""
    try:
        return f"{BackendType.Name(number)} ({number})"
    except ValueError:
        return str(number)
