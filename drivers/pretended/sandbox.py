"""Cores for tests of controllers: they read a real configuration, and pretend that its users are connected.

No traffic passes and no port is opened. A `Script`, which all cores of a node share, says what happens.
"""

from __future__ import annotations

import ipaddress
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from drivers.pretended.scripted import Gate, MemoryGeneration, MemoryPlan, SharedGeneration, SharingDriver
from drivers.process import json_text
from drivers.process.credentials import parse_uuid
from node.base.errors import CoreFailed, InvalidConfig
from node.base.reactor import Reactor
from node.contract.accounts import Account, Accounts, Change, key_of
from node.contract.connections import Address, Arrived, Live
from node.contract.counters import DIRECTIONS, Reading, Scope, Seen, counter_name
from node.contract.driver import Applied, Host
from protos.service_pb2 import BackendStatsResponse, User

VERSION = "0.0.0-sandbox"
WARNING = "this node is a sandbox: its core is pretended, and no user can connect"
# Bytes a second of a connection, up and down.
RATES = 1_000, 10_000
# The most bytes of an order, so that sums stay in the counters' range.
MOST_BYTES = 10**15
# Seconds after which a user whose connections were ended is back.
BACK = 1.0
# The fields of `Proxy` that have the credential, by the type of inbound. Others are not managed.
_CREDENTIALS: Mapping[str, tuple[str, str]] = {
    "vless": ("vless", "id"),
    "vmess": ("vmess", "id"),
    "trojan": ("trojan", "password"),
    "shadowsocks": ("shadowsocks", "password"),
    "hysteria": ("hysteria", "auth"),
    "hysteria2": ("hysteria", "auth"),
    "wireguard": ("wireguard", "public_key"),
    "tuic": ("vless", "id"),
    "anytls": ("trojan", "password"),
}
_OTHERS = {
    *("socks", "http", "mixed", "dokodemo-door", "tunnel", "tun", "redirect", "tproxy", "naive", "shadowtls"),
    *("freedom", "blackhole", "loopback", "direct", "block", "dns", "selector", "urltest", "ssh", "tor", "masque"),
}


@dataclass
class Script:
    """What the cores of a sandbox do. `quiet`: users are connected, and have traffic, only by order."""

    quiet: bool = False
    # Errors of the next starts.
    faults: list[Exception] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    # The addresses of users, by key, where they were given.
    addresses: dict[str, list[str]] = field(default_factory=dict)
    drivers: list[Sandbox] = field(default_factory=list)

    def driver(self, name: str, host: Host) -> Sandbox:
        """Make the driver of a kind of core."""
        self.drivers.append(Sandbox(name, host, self))
        return self.drivers[-1]

    @property
    def rates(self) -> tuple[int, int]:
        """Bytes a second of a connection, up and down."""
        return (0, 0) if self.quiet else RATES

    def addresses_of(self, key: str) -> Sequence[str]:
        """The addresses of a user: those given, else one from a network for documentation."""
        usual = [] if self.quiet else [f"198.51.100.{1 + zlib.crc32(key.encode()) % 254}"]
        return self.addresses.get(key, usual)

    def order(self, line: str) -> None:
        """Carry out a line such as `traffic alice 1000 2000`: see docs/controllers.md. Raises `ValueError`."""
        word, *given = line.split()
        orders: Mapping[str, Callable[..., None]] = {
            "traffic": self._traffic,
            "online": self._online,
            "refuse": lambda name: self.refused.add(key_of(name)),
            "accept": lambda name: self.refused.discard(key_of(name)),
            "fail": lambda: self.faults.append(CoreFailed("the core ended before it answered: `fail` was asked for")),
            "crash": self._crash,
            "hang": self._hang,
        }
        if word not in orders:
            raise ValueError(f"{word} is none of {', '.join(orders)}")
        try:
            orders[word](*given)
        except TypeError as error:
            raise ValueError(f"{word} takes other words than {given}") from error

    @property
    def _core(self) -> Pretended:
        """The newest run, which serves new connections. Raises `ValueError` if none runs."""
        runs = [cast(Pretended, run) for driver in self.drivers for run in driver.running]
        if not runs:
            raise ValueError("no core runs")
        return max(runs, key=lambda run: run.begun)

    def _crash(self) -> None:
        self._core.die()

    def _hang(self) -> None:
        self._core.silent = True

    def _traffic(self, name: str, up: str, down: str) -> None:
        sizes = int(up), int(down)
        if min(sizes) < 0 or max(sizes) > MOST_BYTES:
            raise ValueError(f"counters never fall, and have 64 bits: give numbers from 0 to {MOST_BYTES}")
        self._core.carry(key_of(name), *sizes)

    def _online(self, name: str, *addresses: str) -> None:
        self.addresses[key_of(name)] = [str(ipaddress.ip_address(address)) for address in addresses]


class Sandbox(SharingDriver):
    """Satisfies `Driver`, under the name of a real core, for the configurations of that core.

    It reads the tags and types of inbounds and outbounds, and nothing else.
    """

    def __init__(self, name: str, host: Host, script: Script) -> None:
        super().__init__(host.reactor)
        self.name, self.log, self.script = name, host.log, script
        self.kind, self.faults = Pretended, script.faults

    def fingerprint(self, config_text: str) -> str:
        return json_text.fingerprint(config_text)

    async def version(self) -> str:
        return VERSION

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> MemoryPlan:
        try:
            tree = json_text.parse(config_text)
            inbounds, outbounds = (_types(tree, key) for key in ("inbounds", "outbounds"))
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidConfig(f"Failed to start: the configuration cannot be read: {error}") from error
        types = {tag: kind for tag, kind in inbounds.items() if kind in _CREDENTIALS and tag not in exclude}
        return PretendedPlan(config_text, tuple(types), self, (WARNING,), (), types, (*inbounds,), (*outbounds,))

    def _refuses(self, core: MemoryGeneration, change: Change) -> bool:
        return change.key in self.script.refused or super()._refuses(core, change)


def _types(tree: json_text.Json, key: str) -> dict[str, str]:
    """The types of the inbounds or outbounds that have a tag, by tag. Raises `ValueError` for those of no core."""
    found: dict[str, str] = {}
    for each in tree.get(key) or []:
        kind, tag = str(each.get("protocol") or each.get("type")).lower(), each.get("tag")
        if kind not in _CREDENTIALS and kind not in _OTHERS:
            raise ValueError(f"{key} have the unknown type {kind}")
        if tag in found:
            raise ValueError(f"two of the {key} have the tag {tag}")
        found |= {str(tag): kind} if tag else {}
    return found


@dataclass(frozen=True)
class PretendedPlan(MemoryPlan):
    """A configuration. `types` has its managed inbounds, `inbounds` and `outbounds` the tags of all."""

    types: Mapping[str, str] = field(default_factory=dict)
    inbounds: tuple[str, ...] = ()
    outbounds: tuple[str, ...] = ()

    def account(self, tag: str, user: User) -> Account | None:
        kind, name = _CREDENTIALS[self.types[tag]]
        text = getattr(getattr(user.proxies, kind), name)
        if not text:
            return None
        credential = parse_uuid(text)[1] if name == "id" else text.encode()
        return Account(credential.hex().encode() + b" " + user.email.encode(), credential)

    def same_credential(self, one: bytes, other: bytes) -> bool:
        return one.partition(b" ")[0] == other.partition(b" ")[0]


@dataclass
class _Link:
    """A pretended connection: its inbound, its source address, and its bytes."""

    tag: str
    address: Address
    received: int = 0
    sent: int = 0


class Pretended(SharedGeneration):
    """A core. A user's connections come when it is asked, and their bytes grow with the time.

    When another run takes over, they go there at once: a draining run has none.
    """

    unseen: Mapping[str, str] = {}
    mixed: Mapping[str, str] = {}
    unlisted: Mapping[str, str] = {}

    def __init__(self, clock: Reactor, plan: PretendedPlan, accounts: Mapping[str, Accounts], stopping: Gate) -> None:
        super().__init__(clock, plan, accounts, stopping)
        self.arrived: Arrived = lambda key, address: None
        self._pretended, self._sandbox = plan, cast(Sandbox, plan.driver)
        self.begun = self._then = clock.seconds()
        # By a user's key and address.
        self._links: dict[tuple[str, str], _Link] = {}
        # When a user whose connection was ended is back at an address.
        self._away: dict[tuple[str, str], float] = {}
        tags = [*((Scope.INBOUND, tag) for tag in plan.inbounds), *((Scope.OUTBOUND, tag) for tag in plan.outbounds)]
        self.counts = {counter_name(scope, tag, way): 0 for scope, tag in tags for way in DIRECTIONS}
        self._sandbox.log.extend([f"{self._time()} [Warning] core: {self._sandbox.name} {VERSION} started"])

    async def counters(self, _: Seen | None = None) -> Reading:
        await self._answered()
        self._pass_time()
        return dict(self.counts)

    async def online(self, key: str) -> Mapping[str, int]:
        await self._answered()
        self._pass_time()
        return {address: int(time.time()) for name, address in self._links if name == key}

    async def online_keys(self) -> Collection[str]:
        await self._answered()
        self._pass_time()
        return {name for name, _ in self._links}

    async def backend_stats(self) -> BackendStatsResponse:
        await self._answered()
        used, uptime = 16 * 1024 * 1024, int(self._clock.seconds() - self.begun)
        return BackendStatsResponse(num_goroutine=8, num_gc=1, alloc=used, total_alloc=used, sys=used, uptime=uptime)

    async def apply(self, changes: Sequence[Change]) -> Applied:
        self._pass_time()
        before, applied = self.accounts, await super().apply(changes)
        for (key, address), link in list(self._links.items()):
            # Removed, or with another credential.
            if before[link.tag].get(key) != self.accounts[link.tag].get(key):
                del self._links[key, address]
                self.cut += 1
        return applied

    async def wind_down(self) -> None:
        self._pass_time()
        await super().wind_down()
        self._links.clear()

    def die(self, code: int = -9) -> None:
        self._pass_time()
        super().die(code)

    async def connected(self) -> int:
        self._pass_time()
        return len(self._links)

    def may_carry(self, key: str) -> bool:
        return True

    async def look(self, keys: Collection[str]) -> list[Live]:
        await self._answered()
        self._pass_time()
        return [
            Live(key, link.address, f"{key} {address}".encode(), 0.0, link.sent, link.received, tag=link.tag)
            for (key, address), link in self._links.items()
            if key in keys
        ]

    async def end(self, connections: Iterable[Live]) -> int:
        self._pass_time()
        ended = 0
        for live in connections:
            place = live.key, str(ipaddress.ip_address(live.address))
            ended += self._links.pop(place, None) is not None
            self._away[place] = self._then + BACK
        return ended

    def carry(self, key: str, up: int, down: int, tag: str = "") -> None:
        """Count bytes of a user, in their first inbound unless another is named. Raises `ValueError`."""
        tag = tag or self._inbound(key) or ""
        if not tag:
            raise ValueError(f"the core has no user {key}")
        name = self.accounts[tag][key].partition(b" ")[2].decode()
        outbound = self._pretended.outbounds[:1]
        for scope, each in (Scope.USER, name), (Scope.INBOUND, tag), *((Scope.OUTBOUND, each) for each in outbound):
            for way, size in zip(DIRECTIONS, (up, down), strict=True):
                counter = counter_name(scope, each, way)
                self.counts[counter] = self.counts.get(counter, 0) + size

    @property
    def _replaced(self) -> bool:
        """Whether new connections go to another run."""
        leader = self._sandbox.led
        return leader is not None and leader is not self and leader.alive

    def _inbound(self, key: str) -> str | None:
        """The first inbound that has the user."""
        return next((tag for tag, users in self.accounts.items() if key in users), None)

    def _pass_time(self) -> None:
        """Count what the connections have carried since the last call, and let users come and go."""
        if not self.alive or self.wound_down or self.silent:
            return
        then, self._then = self._then, self._clock.seconds()
        up, down = (int(self._then * rate) - int(then * rate) for rate in self._sandbox.script.rates)
        for (key, _), link in self._links.items():
            self.carry(key, up, down, link.tag)
            link.received, link.sent = link.received + up, link.sent + down
        wanted = {
            (key, address): tag
            for tag, users in reversed(self.accounts.items())
            for key in users
            for address in self._sandbox.script.addresses_of(key)
            if self._away.get((key, address), 0) <= self._then and not self._replaced
        }
        self._links = {place: link for place, link in self._links.items() if place in wanted}
        for (key, address), tag in wanted.items():
            if (key, address) not in self._links:
                self._links[key, address] = _Link(tag, ipaddress.ip_address(address).packed)
                line = f"{self._time()} from {address}:40000 accepted tcp:example.com:443 [{tag}] email: {key}"
                self._sandbox.log.extend([line])
                self.arrived(key, self._links[key, address].address)

    def _time(self) -> str:
        return time.strftime("%Y/%m/%d %H:%M:%S")
