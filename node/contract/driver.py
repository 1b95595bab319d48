"""The protocols of a core's driver, and what the node gives it.

A driver is a package with a class that satisfies `Driver`, plans that satisfy `Plan`, generations that satisfy
`Generation`, and an entry in `drivers.registry`. The node decides when a run starts and ends (`node.backend.replace`);
the driver only carries it out. What only some cores can do is in `node.contract.abilities`, and how cores outlive the
process of a node in `node.contract.leaving`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from twisted.internet.defer import Deferred

from node.base.logs import Log
from node.base.reactor import Reactor
from node.contract.abuse import AbuseRules
from node.contract.accounts import Account, Accounts, Change, Refusal
from node.contract.counters import Reading, Scope, Seen
from node.contract.keeper import Keeper
from node.contract.routing import Routing
from protos.service_pb2 import (
    BackendStatsResponse,
    BackendType,
    User,
)

# Prefixes of the lines in which cores report why they end. Other lines may contain data of users.
_FATAL = ("panic:", "fatal error:", "Failed to start:", "FATAL")


@dataclass
class Choices:
    """Files that updates have installed in place of the default ones: executables by core name, and the geo lists.

    A change applies to plans made from then on.
    """

    executables: dict[str, Path] = field(default_factory=dict)
    lists: Path | None = None


@dataclass(frozen=True)
class Host:
    """The node's side for a driver: the reactor, the ring, a private directory (0700), its settings.

    `withheld`: files and directories that no core may read. `choices` may change while the node runs. `keeper` has what
    outlives the node. `abuse`: what the operator wants done about abuse. `ports`: the node's own TCP ports.
    """

    reactor: Reactor
    log: Log
    directory: Path
    settings: Mapping[str, str]
    withheld: Sequence[Path] = ()
    choices: Choices = field(default_factory=Choices)
    keeper: Keeper = field(default_factory=Keeper)
    abuse: AbuseRules = field(default_factory=AbuseRules)
    ports: Sequence[int] = ()


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
    def pid(self) -> int | None:
        """The PID while it runs; None if it is not one process."""

    @property
    def cut(self) -> int:
        """How many connections of removed users it has cut so far."""

    @property
    def lingering(self) -> bool:
        """Whether it keeps removed users out but still knows their credentials, which a new run would not."""

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

    async def counters(self, seen: Seen | None = None) -> Reading:
        """All counters, cumulative since this process began, except those of the node's own inbounds and outbounds.

        Those that are in `seen` unchanged may be missing; then it has all of this reading. Inbounds and outbounds
        without traffic are included with 0. Never resets. Raises `errors.CoreFailed`.
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


class Plan(Protocol):
    """A configuration that the core accepted, without users; it can be launched any number of times."""

    @property
    def tags(self) -> Sequence[str]:
        """The managed inbounds: those that get the supplied users."""

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings for the operator about this configuration."""

    @property
    def notes(self) -> Sequence[str]:
        """What the node has added to the configuration, a line each."""

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
        """The version of the executable. Raises `errors.CoreFailed` with what to do if it is missing."""

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> Plan:
        """Have the core parse a configuration; running cores are not touched. Raises `errors.InvalidConfig`."""


def type_name(number: int) -> str:
    """Return the name of a backend type with its number, or the number alone."""
    try:
        return f"{BackendType.Name(number)} ({number})"
    except ValueError:
        return str(number)
