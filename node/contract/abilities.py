"""Abilities that only some runs of a core have, each a protocol: the node asks for it with `isinstance`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from node.contract.counters import Asked, Reading
from node.contract.driver import Generation, Plan
from protos.service_pb2 import (
    BalancerInfoResponse,
    Latency,
    RouteResult,
    RoutingRule,
    TestRouteRequest,
)


@runtime_checkable
class CountsOnline(Protocol):
    """A generation that can count a user's addresses even if it cannot list them."""

    async def online_count(self, key: str) -> int:
        """The number of addresses that a user is connected from. Raises as `Generation.online`."""


@runtime_checkable
class ListsOnline(Generation, Protocol):
    """A generation that can list who is online, including in inbounds where it cannot attribute connections."""

    @property
    def unlisted(self) -> Mapping[str, str]:
        """The managed inbounds whose users it does not list, and why, for an operator."""

    async def online_keys(self) -> Collection[str]:
        """The keys of the users for whom `online` has an address. Raises as `online`."""


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
class CountsSome(Protocol):
    """A generation that can read some counters at a fraction of the cost of all."""

    async def some_counters(self, wanted: Iterable[Asked]) -> Reading:
        """At least these counters, as far as they exist. Otherwise as `Generation.counters`."""


@runtime_checkable
class MeasuresLatency(Protocol):
    """A generation that measures the latency of outbounds."""

    async def latency(self) -> Sequence[Latency]:
        """The newest measurements, in any order; an outbound that was not measured yet may be missing.

        Raises `errors.Unsupported`, with what to add, if the configuration measures none, and `errors.CoreFailed`.
        """


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


@runtime_checkable
class NamesTransports(Protocol):
    """A generation that knows how users connect."""

    @property
    def transports(self) -> Collection[str]:
        """A word for each kind of inbound: see `Bill.transports` in protos/service.proto."""


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
