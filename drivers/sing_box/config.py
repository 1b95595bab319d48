"""Turn a controller's configuration into the one that the node runs: what it adds, enforces and removes. Pure.

The input is the output of `sing-box format` for the controller's text: every key has its canonical name and occurs
once. Names of keys: `option/*.go` of sing-box 1.14.1.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivers.process.aliases import PLAIN, Aliases
from drivers.process.allowlist import NOTHING_MORE, Allowed
from drivers.process.closed import OPEN, Closed
from drivers.process.credentials import require_usable
from drivers.process.generation import single_path
from drivers.process.json_text import Json, parse
from drivers.sing_box import abuse, allowlist
from drivers.sing_box.abuse import NOTHING as NOTHING_ADDED
from drivers.sing_box.abuse import Added
from drivers.sing_box.accounts import (
    BUILDERS,
    LOGINS,
    Inbound,
    alike,
    inbound_of,
    label,
    login_of,
    name_of,
    named,
    quoted_name,
    random_entry,
)
from drivers.sing_box.closed import close
from drivers.sing_box.listening import Listens
from drivers.sing_box.overrides import TAGGED, take_over
from node.base.errors import InvalidConfig
from node.contract.abuse import NO_RULES, AbuseRules
from node.contract.accounts import Account, Accounts
from node.contract.counters import DIRECTIONS, Scope, counter_name
from protos.service_pb2 import User

UNCERTAIN = (
    "this sing-box was built without with_v2ray_api: the node sums traffic from the core's stream of connections, "
    "which omits some when many begin and end at once on a busy machine; another warning then says how many bytes"
)

# The inbound type whose users can be changed while the core runs, through ssm-api ("live users").
LIVE = "shadowsocks"
# The counters that ssm-api has for each user.
_COUNTED = [
    f"user_{what}"
    for what in ("uplink", "downlink", "uplink_packets", "downlink_packets", "tcp_sessions", "udp_sessions")
]
# Inbound types that can pass their connections to another inbound (`detour`).
_LEADING = ("shadowtls", "vmess")


@dataclass(frozen=True)
class ApiAddress:
    """The addresses of the APIs of one core process: ports of 127.0.0.1.

    `stats_port` is v2ray_api's, if the build has it; `users_port` is ssm-api's, if an inbound has live users. `secret`
    is that of the api service, and the first part of ssm-api's paths.
    """

    port: int
    secret: str
    stats_port: int | None = None
    users_port: int | None = None

    @classmethod
    def new(cls, free_ports: Callable[[int], Sequence[int]], counts: bool, live: bool) -> ApiAddress:
        """Choose ports and a secret. Raises `OSError` if no ports are free."""
        port, *more = free_ports(1 + counts + live)
        stats = more.pop(0) if counts else None
        return cls(port, secrets.token_urlsafe(32), stats, more[0] if live else None)

    @property
    def ports(self) -> list[int]:
        return [port for port in (self.port, self.stats_port, self.users_port) if port is not None]

    def path(self, number: int) -> str:
        """Return the ssm-api path of an inbound's users, by the inbound's index in `Plan.live`."""
        return f"/{self.secret}/{number}"


@dataclass(frozen=True)
class Plan(Listens):
    """A configuration, and the properties of its managed inbounds."""

    inbounds: Mapping[str, Inbound]
    warnings: Sequence[str]
    abuse: Added = NOTHING_ADDED
    notes: Sequence[str] = ()
    binding: Closed = OPEN

    @property
    def tags(self) -> Sequence[str]:
        return list(self.inbounds)

    @property
    def aliased(self) -> Sequence[str]:
        return [tag for tag, inbound in self.inbounds.items() if inbound.type not in LOGINS]

    @property
    def live(self) -> Sequence[str]:
        """The managed inbounds whose users can be changed while the core runs."""
        return [tag for tag, inbound in self.inbounds.items() if inbound.type == LIVE]

    @property
    def detours(self) -> Mapping[str, Mapping[str, int]]:
        """By the tag of an inbound: the managed inbounds that detour to it, with their ports.

        The core reports the connections of those as connections of the inbound behind them.
        """
        found: dict[str, dict[str, int]] = {}
        for inbound in self.tree.get("inbounds", []):
            if inbound["tag"] in self.inbounds and inbound["type"] in _LEADING and inbound.get("detour"):
                found.setdefault(inbound["detour"], {})[inbound["tag"]] = inbound.get("listen_port", 0)
        return found

    @property
    def unseen(self) -> frozenset[str]:
        """The managed inbounds that detour to an unmanaged one, where users' connections cannot be distinguished."""
        return frozenset(tag for behind, tags in self.detours.items() if behind not in self.inbounds for tag in tags)

    @property
    def tcp_ports(self) -> Mapping[str, Sequence[range]]:
        """By managed inbound: the TCP ports of its users, with those of inbounds that detour to it."""
        ports = {inbound["tag"]: inbound["listen_port"] for inbound in self.tcp}
        ways = {tag: [tag, *self.detours.get(tag, ())] for tag in self.inbounds}
        return {tag: [range(ports[one], ports[one] + 1) for one in some if one in ports] for tag, some in ways.items()}

    @property
    def zero_counters(self) -> dict[str, int]:
        """All counters of inbounds and outbounds, with 0: the core omits those that have carried nothing yet."""
        scopes = (Scope.INBOUND, Scope.OUTBOUND, Scope.OUTBOUND)
        return {
            counter_name(scope, handler["tag"], direction): 0
            for scope, kind in zip(scopes, TAGGED, strict=True)
            for handler in self.tree.get(kind, [])
            for direction in DIRECTIONS
        }

    @property
    def own_names(self) -> list[str]:
        """The names of users in inbounds of the configuration that are not managed."""
        users = (user for inbound in self.tree.get("inbounds", []) for user in inbound.get("users", []))
        return [user.get("name") or user.get("username") or "" for user in users]

    def same_credential(self, one: bytes, other: bytes) -> bool:
        return alike(one, other)

    def account(self, tag: str, user: User) -> Account | None:
        inbound = self.inbounds[tag]
        account = BUILDERS[inbound.type](inbound, user)
        if account is None:
            require_usable(user)
        return account


def plan(
    formatted: bytes,
    exclude: frozenset[str],
    directory: Path,
    counts: bool,
    allowed: Allowed = NOTHING_MORE,
    against: AbuseRules = NO_RULES,
    closed: Closed = OPEN,
) -> Plan:
    """Build the plan from the output of `sing-box format`. Raises `InvalidConfig`.

    The core keeps its files below `directory`. `counts`: whether the build has counters (v2ray_api). `allowed`: what a
    configuration may contain beyond what the node knows. `against`: what the operator wants done about abuse. `closed`:
    the targets that no user reaches.
    """
    tree = _read(formatted)
    allowlist.judge(tree, allowed)
    _name(tree)
    warnings, effect = [*take_over(tree, directory)], close(tree, closed)
    warnings += effect.warnings
    if not counts:
        warnings.append(UNCERTAIN)
    for one, other in Listens(tree).taken_twice():
        raise InvalidConfig(f"the inbounds {one['tag']!r} and {other['tag']!r} have the same port {one['listen_port']}")
    inbounds, notes = {}, []
    for inbound in tree.get("inbounds", []):
        managed = None if inbound["tag"] in exclude else inbound_of(inbound, inbound["tag"])
        if "listen_port" in inbound:
            # So that the next core can listen on the port beside this one.
            inbound["reuse_addr"] = True
        if inbound.pop("tcp_multi_path", False):
            notes.append(single_path(inbound["tag"]))
        if managed:
            inbounds[managed.tag] = managed
            inbound.pop("users", None)
            inbound.pop("managed", None)
            if managed.type == LIVE:
                inbound["managed"] = True
            if managed.method and not managed.method.startswith("2022"):
                inbound.pop("password", None)
    added = abuse.add(tree, inbounds, against)
    notes += [*effect.notes, *added.notes]
    return Plan(tree, inbounds, [*warnings, *added.warnings], added, notes, effect.binding)


def _read(formatted: bytes) -> Json:
    try:
        tree = parse(formatted.decode())
        if b"\\u" in formatted:
            # An escaped lone surrogate parses, but cannot be encoded as UTF-8.
            json.dumps(tree, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"the node cannot parse this configuration: {error}") from error
    allowlist.check_shape(tree)
    read: Json = tree
    return read


def render(
    plan: Plan, api: ApiAddress, target: Mapping[str, Accounts], roll: str = "", aliases: Aliases = PLAIN
) -> bytes:
    """Write the complete configuration with these users, by these names. The core reads live users from `roll`."""
    users = _named(target, aliases)
    # Entries are JSON already, and there may be 100,000: a placeholder stands for them in the tree.
    token = secrets.token_hex(16)
    places = {tag: f"{token}{number}" for number, tag in enumerate(plan.inbounds.keys() - set(plan.live))}
    tree = {
        **plan.tree,
        "log": _log(plan.tree.get("log", {})),
        "inbounds": [
            {**inbound, "users": places[inbound["tag"]]} if inbound["tag"] in places else inbound
            for inbound in plan.tree.get("inbounds", [])
        ],
        "services": [*plan.tree.get("services", []), *_services(plan, api, roll)],
        "route": _route(plan.tree.get("route", {}), api),
    }
    if plan.abuse is not NOTHING_ADDED:
        tree |= _against(plan, tree, target)
    if aliases:
        tree |= {part: _fitting(tree[part], aliases) for part in ("route", "dns") if part in tree}
    if api.stats_port is not None:
        tree["experimental"] = {**plan.tree.get("experimental", {}), "v2ray_api": _stats(plan.tree, api, token)}
    entries = {
        place.encode(): list(users[tag].values()) or [random_entry(plan.inbounds[tag])] for tag, place in places.items()
    }
    entries[token.encode()] = _names(plan, users)
    text = json.dumps(tree, ensure_ascii=False).encode()
    return re.sub(rb'"(%s\d*)"' % token.encode(), lambda place: b"[%s]" % b",".join(entries[place[1]]), text)


def _named(target: Mapping[str, Accounts], aliases: Aliases) -> Mapping[str, Accounts]:
    """The users by the core's names for them."""
    if not aliases:
        return target
    ends = {tag: aliases.end(tag) for tag in target}
    return {tag: {key: named(packed, ends[tag]) for key, packed in some.items()} for tag, some in target.items()}


def _fitting(value: Any, aliases: Aliases) -> Any:
    """Settings whose rules by user fit the core's names as they fitted the users' own names."""
    if isinstance(value, list):
        return [_fitting(item, aliases) for item in value]
    if not isinstance(value, dict):
        return value
    rules = {key: _fitting(item, aliases) for key, item in value.items()}
    if users := value.get("auth_user"):
        names = [alias for user in ([users] if isinstance(users, str) else users) for alias in aliases.all(user)]
        rules["auth_user"] = [*dict.fromkeys([*names, *map(label, names)])]
    return rules


def _against(plan: Plan, tree: Mapping[str, Any], target: Mapping[str, Accounts]) -> Json:
    """The parts of the configuration to which ABUSE adds something."""
    exempt = (name_of(some[key]) for some in target.values() for key in plan.abuse.exempt & some.keys())
    names = {spelled for name in exempt for spelled in (name, label(name))}
    api, *theirs = tree["route"]["rules"]
    rules = [api, *plan.abuse.rules(theirs, names)]
    outbounds = plan.abuse.outbounds(tree.get("outbounds", []))
    return {"route": {**tree["route"], "rules": rules}, **({"outbounds": outbounds} if outbounds else {})}


def roll(plan: Plan, api: ApiAddress, target: Mapping[str, Accounts], aliases: Aliases = PLAIN) -> bytes:
    """Write the file of live users, by these names, that the core reads when it starts: a cache file of ssm-api.

    It contains a counter of 0 for each user: this guards against a crash of the core, which 1.14.4 still has.
    """
    endpoints: dict[str, Json] = {}
    target = _named({tag: target[tag] for tag in plan.live}, aliases)
    for number, tag in enumerate(plan.live):
        users = dict(map(login_of, target[tag].values()))
        zeros = dict.fromkeys(users, 0)
        endpoints[api.path(number)] = {"users": users, **dict.fromkeys(_COUNTED, zeros)}
    return json.dumps({"endpoints": endpoints}).encode()


def _names(plan: Plan, target: Mapping[str, Accounts]) -> list[bytes]:
    """Return every user's name as JSON: v2ray_api counts only users whom its configuration names."""
    live = set(plan.live)
    own = (json.dumps(name, ensure_ascii=False).encode() for name in plan.own_names)
    ours = (
        json.dumps(label(name_of(packed)), ensure_ascii=False).encode()
        if tag in live and b"/" in packed
        else quoted_name(packed)
        for tag, accounts in target.items()
        for packed in accounts.values()
    )
    return [name for name in dict.fromkeys((*own, *ours)) if name != b'""']


def _log(theirs: Mapping[str, Any]) -> Json:
    """Log to stderr with timestamps; the level is the controller's."""
    return {**{key: theirs[key] for key in ("level", "disabled") if key in theirs}, "timestamp": True}


def _services(plan: Plan, api: ApiAddress, roll: str) -> Iterator[Json]:
    def service(kind: str, port: int, **more: object) -> Json:
        return {"type": kind, "tag": secrets.token_hex(8), "listen": "127.0.0.1", "listen_port": port, **more}

    yield service("api", api.port, secret=api.secret)
    if api.users_port is not None:
        servers = {api.path(number): tag for number, tag in enumerate(plan.live)}
        yield service("ssm-api", api.users_port, servers=servers, **({"cache_path": roll} if roll else {}))


def _route(theirs: Mapping[str, Any], api: ApiAddress) -> Json:
    """Prepend a rule that rejects connections of users to the APIs' ports, by any name or address of this machine."""
    rule = {"port": api.ports, "network": ["tcp"], "action": "reject"}
    return {**theirs, "rules": [rule, *theirs.get("rules", [])]}


def _stats(tree: Mapping[str, Any], api: ApiAddress, token: str) -> Json:
    def tags(*kinds: str) -> list[str]:
        return [handler["tag"] for kind in kinds for handler in tree.get(kind, [])]

    stats = {
        "enabled": True,
        "inbounds": tags("inbounds", "endpoints"),
        "outbounds": tags("outbounds", "endpoints"),
        "users": token,
    }
    return {"listen": f"127.0.0.1:{api.stats_port}", "stats": stats}


def _name(tree: Json) -> None:
    """Give everything without a tag the tag that the core would give it: its index.

    Raises `InvalidConfig` if two inbounds have the same tag.
    """
    for kind in TAGGED:
        for number, handler in enumerate(tree.get(kind, [])):
            handler["tag"] = handler.get("tag") or str(number)
    times = Counter(inbound["tag"] for inbound in tree.get("inbounds", []))
    if double := [tag for tag, count in times.items() if count > 1]:
        raise InvalidConfig(f"several inbounds have the tag {min(double)!r}")
