"""All sides that a bench compares in one run: this node, another node, and bare transports, each with its own users."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.peer import peer
from scripts.bench.results import Row
from scripts.bench.sides import Call, Ours, Protocol, Side, calling, medians, transport
from scripts.bench.stage import Stage, backing, first_byte, stage

PROTOCOLS: tuple[Protocol, ...] = ("grpc", "rest")
# Seconds between two readings of counters by the node; its default.
INTERVAL = "10"
# Seconds for work that the node does after a Start.
_SETTLED = 2.0


@dataclass(frozen=True)
class Arena:
    """The sides of a run. `rounds` is how often each is measured."""

    on: Stage
    ours: Ours
    peers: Mapping[Protocol, Side]
    floors: Mapping[Protocol, Side]
    rounds: int

    def sides(self, protocol: Protocol, *, floor: bool = True) -> dict[str, Side]:
        """The sides that use this protocol, by name."""
        found = [self.ours, *([self.peers[protocol]] if protocol in self.peers else [])]
        return {side.name: side for side in [*found, *([self.floors[protocol]] if floor else [])]}

    def nodes(self) -> list[tuple[Protocol, Side]]:
        """Each side that runs a core, once, with the protocol to call it by."""
        return [("grpc", self.ours), *self.peers.items()]

    def crowd(self, size: int, inbounds: int = 1) -> None:
        """Start every node with so many users."""
        for protocol, side in self.nodes():
            side.backing = backing(size, inbounds)
            with calling(side, protocol) as call:
                call("Start", side.backing.request().SerializeToString())
        time.sleep(_SETTLED)
        for side in self.floors.values():
            side.backing = backing(min(size, 10_000), inbounds)


@contextmanager
def arena(executable: Path | None, rounds: int) -> Iterator[Arena]:
    """Run this node, the bare transports, and the other node if `executable` is given."""
    with ExitStack() as stack:
        on = stack.enter_context(stage(TRAFFIC_INTERVAL=INTERVAL))
        ours = Ours(on)
        with calling(ours, "rest") as call:
            info = {"GetBaseInfo": call("GetBaseInfo", b""), "Start": call("GetBaseInfo", b"")}
        floors = {protocol: stack.enter_context(transport(protocol, info)) for protocol in PROTOCOLS}
        found = {protocol: stack.enter_context(peer(executable, protocol)) for protocol in PROTOCOLS if executable}
        yield Arena(on, ours, found, floors, rounds)


def row(name: str, unit: str, found: Mapping[str, tuple[float, ...]], place: int = 0, core: float | None = None) -> Row:
    """A row of the figures at index `place` of all sides."""
    figures = {side: values[place] for side, values in found.items()}
    return Row(name, unit, figures["ours"], figures.get("peer"), core, figures.get("transport"))


def starts(among: Arena, size: int) -> dict[str, tuple[float, ...]]:
    """Milliseconds of a Start after a Stop until its reply, and until the first byte (a transport has no such)."""
    with ExitStack() as stack:
        sides, proxies, calls = among.sides("grpc"), dict[str, int](), dict[str, Call]()
        for name, side in sides.items():
            side.backing = backing(size)
            calls[name] = stack.enter_context(calling(side, "grpc"))
            if name != "transport":
                proxies[name] = stack.enter_context(among.on.client(side.backing))
                calls[name]("Start", side.backing.request().SerializeToString())

        def measure(side: Side) -> tuple[float, ...]:
            return started(among, side, calls[side.name], proxies.get(side.name))

        return medians(sides, among.rounds, measure)


def started(among: Arena, side: Side, call: Call, proxy: int | None) -> tuple[float, ...]:
    request = side.backing.request().SerializeToString()
    if proxy is not None:
        call("Stop", b"")
    with ThreadPoolExecutor(1) as pool:
        begun = time.perf_counter()
        replied = pool.submit(lambda: (call("Start", request), time.perf_counter())[1])
        if proxy is not None:
            first_byte(side.backing.ports[0], proxy, among.on.echo)
        byte = time.perf_counter() - begun
        return 1000 * (replied.result() - begun), 1000 * byte
