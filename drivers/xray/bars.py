"""Rules that keep users out from some addresses, for connections whose sockets a reverse proxy has. Pure.

The encoding of addresses depends on the core's version, so the core converts one, and the node nests others as it did.
A rule's tag has all that is in the rule: the next node process reads it in the core's list of rules.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from drivers.xray import messages, rules
from drivers.xray.overrides import BLACKHOLE
from node.contract.accounts import key_of
from protos.xray_pb2 import Config, Nothing, RouterConfig, RoutingRule

# RoutingRule.user_email; and Cidr: ip = 1, prefix = 2 (`app/router/config.proto` of Xray-core 26.3.27).
_USER, _IP, _PREFIX = b"\x3a", b"\x0a", b"\x10"
_EXAMPLE = "203.0.113.7/32"
# The core takes such names for patterns.
_PATTERN = "regexp:"
# The wire type of bytes, text and messages.
_BYTES = 2

_FRONTED = (
    "where a reverse proxy reports their address, the core refuses new connections from an address too many; those "
    "that live go on until they end, or until a Start replaces the core and `DRAIN_TIMEOUT` has passed"
)
_UNBARRED = (
    "where a reverse proxy reports their address, this core refuses none: an earlier node started it, or its version "
    "encodes addresses in a way that the node does not know"
)

# Text of a configuration for the core to convert.
TEXT = json.dumps({"routing": {"rules": [{"source": [_EXAMPLE], "outboundTag": BLACKHOLE}]}})


def nesting(converted: bytes) -> tuple[bytes, ...]:
    """The tags of the fields around an address in a rule, the outermost first. `converted`: what the core made of TEXT.

    Empty if no address is found.
    """
    [rule] = rules.rules_of(Config.FromString(converted))
    return _around(rule.SerializeToString(), _cidr(_EXAMPLE))


@dataclass(frozen=True)
class Bars:
    """Makes the rules for one run of the core, whose API has this `token`: lines of the log that have it are left out.

    `barred` has the networks from which each user is kept out, by key. All runs share it, so that a new one begins with
    it. Without `nesting` the run has no inbound behind a reverse proxy.
    """

    token: str
    nesting: Sequence[bytes] = ()
    barred: dict[str, Sequence[str]] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """What an operator should know about limits of addresses behind a reverse proxy."""
        return _FRONTED if self.nesting else _UNBARRED

    def rules(self, spelled: Mapping[str, Sequence[str]]) -> list[RoutingRule]:
        """A rule for each barred user, by key: the spellings of their e-mail."""
        if not self.nesting:
            return []
        return [self._rule(spelled[key], self.barred[key]) for key in self.barred if spelled.get(key)]

    def settings(self, spelled: Mapping[str, Sequence[str]]) -> bytes:
        """Router settings with these rules, to put before the others."""
        return RouterConfig(rule=self.rules(spelled)).SerializeToString()

    def is_bar(self, tag: str) -> bool:
        return tag.startswith(self._prefix)

    def read(self, tags: Iterable[str]) -> dict[str, Sequence[str]]:
        """The networks from which users are kept out by rules with these tags, by key."""
        found = {}
        for tag in filter(self.is_bar, tags):
            emails, networks = json.loads(urlsafe_b64decode(tag.removeprefix(self._prefix)))
            found[key_of(emails[0])] = networks
        return found

    @property
    def _prefix(self) -> str:
        return rules.own_tag(f"{self.token}-out-")

    def _rule(self, emails: Sequence[str], networks: Sequence[str]) -> RoutingRule:
        users = [messages.field(_USER, _exact(email).encode()) for email in emails]
        sources = [self._nested(_cidr(network)) for network in networks]
        rule = RoutingRule.FromString(b"".join([*users, *sources]))
        content = json.dumps([[*emails], [*networks]]).encode()
        rule.tag, rule.rule_tag = BLACKHOLE, self._prefix + urlsafe_b64encode(content).decode()
        return rule

    def _nested(self, cidr: bytes) -> bytes:
        for tag in reversed(self.nesting):
            cidr = messages.field(tag, cidr)
        return cidr


def _exact(email: str) -> str:
    return f"{_PATTERN}^{re.escape(email)}$" if email.startswith(_PATTERN) else email


def _cidr(network: str) -> bytes:
    found = ip_network(network)
    return messages.field(_IP, found.network_address.packed) + _PREFIX + messages.varint(found.prefixlen)


def _around(message: bytes, wanted: bytes) -> tuple[bytes, ...]:
    try:
        fields = UnknownFieldSet(Nothing.FromString(message))
    except DecodeError:  # not a message, but text or bytes
        return ()
    for each in (fields[number] for number in range(len(fields))):
        if each.wire_type == _BYTES and wanted in each.data:
            tag = messages.varint(each.field_number << 3 | _BYTES)
            if each.data == wanted:
                return (tag,)
            if inner := _around(each.data, wanted):
                return (tag, *inner)
    return ()
