"""The environment of the node under test: destinations of traffic, inbounds on their own ports, users' clients."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Self

from protos.service_pb2 import Backend, User
from scripts.staging import protocols
from scripts.staging.backend import user
from scripts.staging.core import Json, XrayClient
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.ports import free_port
from scripts.staging.target import Address
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from tests.harness.grounds import GROUNDS

# Controllers' tags have spaces.
VLESS, TROJAN, SHADOWSOCKS = "VLESS TCP", "Trojan TCP", "Shadowsocks 2022"
COUNTING = {
    "levels": {"0": {f"statsUser{what}": True for what in ("Uplink", "Downlink", "Online")}},
    "system": {f"stats{side}{way}": True for side in ("Inbound", "Outbound") for way in ("Uplink", "Downlink")},
}
BLOCKED, BALANCER = "blocked.test", "balancer"
# A core may not list users from 127.0.0.1 as online.
SOURCE = "127.0.0.2"


@dataclass(frozen=True)
class Options:
    """The node under test, and the hosts by which its core and the clients reach each other.

    `clients` is the host where clients reach the core's inbounds, `echo` the one where the core reaches this machine.
    `patience` is the longest that a change may take to be in effect, in seconds. Without `traffic` no client connects
    to the core: it may be a pretended one.
    """

    node: Address
    core: str = "xray"
    clients: str = "127.0.0.1"
    echo: str = "127.0.0.1"
    patience: float = 20.0
    traffic: bool = True

    @property
    def local(self) -> bool:
        return self.clients == "127.0.0.1"


class Stage:
    """One for a whole run: it starts the clients' core once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ground = next(ground for ground in GROUNDS if ground.name == options.core)
        self.echo = EchoServer(options.echo)
        # A balancer routes connections to it, if the core has balancers.
        self.balanced = EchoServer(options.echo)
        method = protocols.shadowsocks_2022("2022-blake3-aes-128-gcm", 16)
        parts = {VLESS: protocols.vless(), TROJAN: protocols.trojan(), SHADOWSOCKS: method}
        self.doors = {tag: Kind(tag, protocol, raw()) for tag, protocol in parts.items()}
        self.ports = {tag: free_port() for tag in parts}
        self._numbers = itertools.count(random.randrange(10**6, 10**8))
        self.people = [TestUser.new(str(next(self._numbers))) for _ in range(3)]
        self._ways = {(person, tag): free_port() for person in self.people for tag in parts}
        self._stack = ExitStack()

    def newcomers(self) -> list[TestUser]:
        """The users' credentials under new names, for which nothing was counted before."""
        return [replace(person, email=str(next(self._numbers))) for person in self.people]

    def socks(self, person: TestUser, tag: str) -> int:
        """The SOCKS port that leads to this inbound with the user's credentials, whatever the user's name."""
        return next(port for (owner, door), port in self._ways.items() if (owner.uuid, door) == (person.uuid, tag))

    @cached_property
    def inbounds(self) -> list[Json]:
        listen = {"listen": "127.0.0.1" if self.options.local else "0.0.0.0"}
        return [{**self.ground.inbound(kind, self.ports[tag], tag), **listen} for tag, kind in self.doors.items()]

    def member(self, person: TestUser, *tags: str) -> User:
        """A user message as controllers send it: with all kinds of credentials, most of them empty."""
        message = user(person, {tag: self.doors[tag] for tag in tags})
        for name in ("vmess", "vless", "trojan", "shadowsocks", "wireguard", "hysteria"):
            getattr(message.proxies, name).SetInParent()
        return message

    def backend(self, users: Iterable[User], **extra: Any) -> Backend:
        """A Start with the inbounds above; `extra` are fields of the Start, or else keys of the configuration."""
        return self.ground.backend(self.inbounds, users, **{"log": self.ground.verbose, **self._of_xray, **extra})

    @property
    def _of_xray(self) -> Json:
        """Xray's keys for counters (some nodes leave them to the configuration) and a balancer for routing checks."""
        if self.options.core != "xray":
            return {}
        rules = [
            {"type": "field", "domain": [f"full:{BLOCKED}"], "outboundTag": "block", "ruleTag": "blocked"},
            {"type": "field", "port": self.balanced.port, "balancerTag": BALANCER, "ruleTag": "balanced"},
        ]
        routing = {"rules": rules, "balancers": [{"tag": BALANCER, "selector": ["direct"]}]}
        return {"stats": {}, "policy": COUNTING, "routing": routing}

    def renamed(self, backend: Backend, inbound: str, outbound: str) -> Backend:
        """The Start with other tags for the first inbound and the first outbound."""
        config = json.loads(backend.config)
        config["inbounds"][0]["tag"], config["outbounds"][0]["tag"] = inbound, outbound
        return Backend(type=backend.type, config=json.dumps(config), users=backend.users)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.echo)
            stack.enter_context(self.balanced)
            if self.options.traffic:
                stack.enter_context(XrayClient({port: self._way(*key) for key, port in self._ways.items()}))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _way(self, person: TestUser, tag: str) -> Json:
        source = SOURCE if self.options.local else None
        return self.doors[tag].outbound(self.ports[tag], person, self.options.clients, source)
