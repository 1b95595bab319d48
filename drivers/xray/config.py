"""Take over a controller's configuration and add the node's API and users. Pure: core.Config in, core.Config out.

The core itself converts the controller's text (`xray convert pb`), so all names here are canonical. Fields that are
unknown here stay unchanged. Type names and numbers: Xray-core 26.3.27.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from drivers.process.aliases import PLAIN, Aliases
from drivers.process.allowlist import NOTHING_MORE, Allowed
from drivers.process.closed import Closed
from drivers.process.credentials import KEY_BYTES, require_usable
from drivers.process.generation import single_path
from drivers.xray import abuse, allowlist, compat, messages, overrides, rules, wireguard
from drivers.xray.abuse import NOTHING as NOTHING_ADDED
from drivers.xray.abuse import Added
from drivers.xray.access import Shown
from drivers.xray.accounts import BUILDERS, Inbound, named, unnamed
from drivers.xray.closed import OPEN, Closing
from drivers.xray.ingress import Ingress, Listens, ingress_of
from drivers.xray.messages import SIZE, Version, edited
from drivers.xray.text import Hints, hints
from node.base.errors import InvalidConfig
from node.contract.abuse import NO_RULES, AbuseRules
from node.contract.accounts import Account, Accounts
from node.contract.counters import Scope
from node.contract.routing import Routing
from protos import service_pb2, xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig, OutboundHandlerConfig, TypedMessage

# The protocols of inbounds that the node can manage, by the type of their settings.
PROTOCOLS = {
    messages.VLESS: "vless",
    "xray.proxy.vmess.inbound.Config": "vmess",
    messages.TROJAN: "trojan",
    messages.SHADOWSOCKS: "shadowsocks",
    "xray.proxy.hysteria.ServerConfig": "hysteria",
    messages.SHADOWSOCKS_2022: "shadowsocks_2022",
}
# Types of inbounds with users that the core cannot change while it runs, or cannot tell apart.
UNSUPPORTED = {
    messages.WIREGUARD: "WireGuard peers can be supplied as users from Xray 26.6.27 on",
    messages.SHADOWSOCKS_2022_SINGLE: "this Shadowsocks-2022 method has one shared key and no users",
    "xray.proxy.shadowsocks_2022.RelayServerConfig": "a Shadowsocks-2022 relay has destinations, not users",
}
API_SERVICES = tuple(f"xray.app.{name}.command.Config" for name in ("proxyman", "stats", "router"))
HYSTERIA_MISCOUNTED: Version = (26, 3, 27)
_UNIX = 4
# The tags of the field with users in inbound settings, where it is not the first.
_USERS = {"shadowsocks_2022": b"\x1a", "wireguard": b"\x2a"}


@dataclass(frozen=True)
class Plan(Listens):
    """A configuration without users and without the node's API, and the properties of its managed inbounds.

    `ingress`: where the users of managed inbounds connect. `shown`: which of the core's lines the controller asked for.
    `routing`: changes of the rules, already in `base`. `first`: router settings that go before all others. `abuse`:
    what ABUSE added. `binding`: see `Effect`.
    """

    base: Config
    inbounds: Mapping[str, Inbound]
    warnings: tuple[str, ...]
    uncounted: frozenset[Scope]
    ingress: Mapping[str, Ingress]
    shown: Shown
    routing: Routing = Routing()
    first: bytes = b""
    abuse: Added = NOTHING_ADDED
    notes: Sequence[str] = ()
    binding: Closed = Closed()

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self.inbounds)

    @property
    def aliased(self) -> tuple[str, ...]:
        return self.tags

    @property
    def fronted(self) -> frozenset[str]:
        """The tags of managed inbounds for which a reverse proxy may report clients' addresses."""
        return frozenset(tag for tag, entry in self.ingress.items() if entry.fronted)

    def same_credential(self, one: bytes, other: bytes) -> bool:
        return unnamed(one) == unnamed(other)

    def account(self, tag: str, user: service_pb2.User) -> Account | None:
        inbound = self.inbounds[tag]
        account = BUILDERS[inbound.protocol](inbound, user)
        if account is None:
            require_usable(user)
        return account

    def handler(self, tag: str, accounts: Accounts, aliases: Aliases = PLAIN) -> InboundHandlerConfig:
        """The message of a managed inbound with these users, by these names."""
        handler = InboundHandlerConfig()
        handler.CopyFrom(next(inbound for inbound in self.base.inbound if inbound.tag == tag))
        self.add_users(handler, accounts, aliases)
        return handler

    def add_users(self, handler: InboundHandlerConfig, accounts: Accounts, aliases: Aliases) -> None:
        end, users = aliases.end(handler.tag), accounts.values()
        packed = [named(user, end) for user in users] if end else users
        handler.proxy_settings.value += users_field(self.inbounds[handler.tag].protocol, packed)


@dataclass(frozen=True)
class ApiAddress:
    """The API of one run: its unix socket, and a token in its tags. `direct`: the core listens on the socket itself."""

    socket: str
    token: str
    direct: bool

    @property
    def inbound(self) -> str:
        return f"{messages.OURS}in-{self.token}"

    @property
    def outbound(self) -> str:
        return f"{messages.OURS}api-{self.token}"


def plan(
    converted: bytes,
    text: str,
    exclude: frozenset[str],
    version: Version = HYSTERIA_MISCOUNTED,
    allowed: Allowed = NOTHING_MORE,
    against: AbuseRules = NO_RULES,
    anywhere: bytes = b"",
    closing: Closing = OPEN,
) -> Plan:
    """Take over a configuration that was converted from `text`. `against`, `anywhere`: as for `abuse.add`.
    `closing`: what keeps users from the server itself.

    Raises `InvalidConfig` for settings neither known nor allowed, and for those that the core takes but cannot use.
    """
    try:
        base = _judged(converted, text, version, allowed)
        # Reads the users of inbounds that are left as configured, so that they are known to be valid.
        rules.outbounds_of(base)
        return _against(_planned(base, text, exclude, version, closing), against, anywhere)
    except DecodeError as error:
        # Another version of the core may give these fields another meaning.
        reason = "the node cannot parse this configuration as the core converted it: is this core's version supported?"
        raise InvalidConfig(reason) from error


def rerouted(
    plan: Plan, routing: Routing, converted: bytes, text: str, version: Version, allowed: Allowed = NOTHING_MORE
) -> Plan:
    """The plan as it was prepared with these changes of its rules; `converted` is the core's form of `text`.

    Raises as `rules.added` and `rules.changed`, and `InvalidConfig` for settings neither known nor allowed.
    """
    found = rules.added(_judged(converted, text, version, allowed), routing)
    tags = [rules.public(rule.rule_tag) for rule in found]
    tagged = tuple(each._replace(tag=tag) for each, tag in zip(routing.added, tags, strict=True))
    changed = rules.changed(plan.base, routing, found)
    abuse.follow(changed, plan.abuse)
    overrides.have_reloaded(changed, text, version)
    return replace(plan, base=changed, routing=replace(routing, added=tagged))


def _against(plan: Plan, rules: AbuseRules, anywhere: bytes) -> Plan:
    """The plan with what ABUSE adds."""
    added = abuse.add(plan.base, plan.inbounds, rules, anywhere)
    if not (added.notes or added.warnings):
        return plan
    warnings, first = (*plan.warnings, *added.warnings), plan.first + added.first
    notes = [*plan.notes, *added.notes]
    shown = replace(plan.shown, renamed=added.shown)
    return replace(plan, warnings=warnings, notes=notes, first=first, shown=shown, abuse=added)


def _judged(converted: bytes, text: str, version: Version, allowed: Allowed) -> Config:
    """Parse a converted text. Raises `InvalidConfig` for settings neither known nor allowed."""
    base = Config.FromString(converted)
    allowlist.judge(base, text, version, allowed)
    for address, where in allowlist.sockets(base):
        allowed.judge_socket(address, where)
    return base


def _planned(base: Config, text: str, exclude: frozenset[str], version: Version, closing: Closing) -> Plan:
    inbounds: dict[str, Inbound] = {}
    warnings, notes = list(compat.warnings(base, text, version)), []
    for handler, hint in zip(base.inbound, hints(text, len(base.inbound)), strict=True):
        _require_port(handler)
        messages.override_transport(handler)
        overrides.distrust_forwarded(handler, version)
        if overrides.use_single_path(handler):
            notes.append(single_path(handler.tag))
        managed = None if handler.tag in exclude else _manage(handler, hint, warnings, version)
        if managed is not None:
            inbounds[managed.tag] = managed
        elif handler.proxy_settings.type in (*PROTOCOLS, messages.SHADOWSOCKS_2022_SINGLE):
            warnings.extend(filter(None, [compat.unread_users(handler, hint, version)]))
    for outbound in base.outbound:
        messages.override_transport(outbound)
    if not base.outbound:
        # The first outbound is the default one; without any, that would be the API's.
        base.outbound.append(OutboundHandlerConfig(tag="", proxy_settings=TypedMessage(type=messages.BLACKHOLE)))
    uncounted = _uncounted(inbounds.values(), version)
    if uncounted:
        warnings.append("inbound traffic is not counted: with a Hysteria inbound this Xray would count its users as 0")
    shown = overrides.override(base, count_inbounds=not uncounted)
    rules.bind_selectors(base)
    for number, outbound in enumerate(base.outbound):
        # Without a tag access lines do not name the inbound.
        outbound.tag = outbound.tag or f"{messages.OURS}out-{number}"
    rules.name_rules(base)
    effect = closing.close(base, text, version)
    warnings += effect.warnings
    overrides.have_reloaded(base, text, version)
    first = overrides.add_guard(base, version)
    if first:
        warnings.append(overrides.UNSAFE.format(".".join(map(str, version))))
    ingress = ingress_of(base.inbound, inbounds)
    if any(entry.fronted for entry in ingress.values()):
        overrides.add_blackhole(base)
    made = Plan(base, inbounds, tuple(warnings), uncounted, ingress, shown, first=first)
    return replace(made, notes=[*notes, *effect.notes], binding=effect.binding)


def render(
    plan: Plan, api: ApiAddress, accounts: Mapping[str, Accounts], first: bytes = b"", aliases: Aliases = PLAIN
) -> bytes:
    """The serialised configuration of one run: the plan with its users, by these names, and the node's API.

    `first`: more router settings that go before those of the plan.
    """
    config = Config()
    config.CopyFrom(plan.base)
    for handler in config.inbound:
        if handler.tag in plan.inbounds:
            plan.add_users(handler, accounts[handler.tag], aliases)
    _put_first(config, first)
    _add_api(config, api)
    _put_first(config, plan.first)
    if aliases:
        with edited(rules.router_app(config), xray_pb2.RouterConfig) as router:
            for rule in router.rule:
                rule.user_email[:] = aliases.fitting(rule.user_email)
    return config.SerializeToString()


def users_field(protocol: str, accounts: Iterable[bytes]) -> bytes:
    """Encode users to append to an inbound's settings; repeated fields add up."""
    tag = _USERS.get(protocol, b"\x0a")
    # As `messages.field`: there may be 100,000.
    return b"".join([tag + SIZE[len(account)] + account for account in accounts])


def _require_port(handler: InboundHandlerConfig) -> None:
    """Raise `InvalidConfig` for an inbound that lacks a port which the core needs."""
    if handler.proxy_settings.type == messages.DOKODEMO:
        settings = xray_pb2.DokodemoConfig.FromString(handler.proxy_settings.value)
        if _UNIX in settings.networks and not settings.port:
            raise InvalidConfig(
                f"inbound {handler.tag!r}: a dokodemo-door on a unix socket needs a port in its settings"
            )


def _manage(handler: InboundHandlerConfig, hint: Hints, warnings: list[str], version: Version) -> Inbound | None:
    """Strip an inbound's own users. Returns its properties for accounts; None if it is left as configured."""
    settings = handler.proxy_settings
    if handler.tag:
        _promote_to_multi_user(settings)
    protocol = "wireguard" if wireguard.has_users(handler, version) else PROTOCOLS.get(settings.type)
    if protocol is None:
        if settings.type in UNSUPPORTED:
            warnings.append(f"inbound {handler.tag!r} is left as configured: {UNSUPPORTED[settings.type]}")
        return None
    if not handler.tag:
        warnings.append("an inbound without a tag is left as configured: users are supplied by tag")
        return None
    if protocol == "shadowsocks_2022":
        with edited(settings, xray_pb2.Shadowsocks2022MultiUserConfig) as multi:
            multi.ClearField("users")
        return Inbound(handler.tag, protocol, method=multi.method)
    if protocol == "wireguard":
        return Inbound(handler.tag, protocol, key=wireguard.strip(handler))
    with edited(settings, xray_pb2.UsersConfig) as users:
        method = hint.method or _method_of(users, protocol)
        users.ClearField("users")
    if protocol == "hysteria":
        messages.strip_shared_password(handler)
    vision = protocol == "vless" and messages.carries_vision(handler)
    return Inbound(handler.tag, protocol, vision, hint.flow if vision else "", method)


def _promote_to_multi_user(settings: TypedMessage) -> None:
    """Undo what the core's parser does without clients: a single-user server, open to all who know the server's key."""
    if settings.type != messages.SHADOWSOCKS_2022_SINGLE:
        return
    single = xray_pb2.Shadowsocks2022ServerConfig.FromString(settings.value)
    if single.method in KEY_BYTES:
        multi = xray_pb2.Shadowsocks2022MultiUserConfig(method=single.method, key=single.key, network=single.network)
        settings.type, settings.value = messages.SHADOWSOCKS_2022, multi.SerializeToString()


def _method_of(users: xray_pb2.UsersConfig, protocol: str) -> str:
    """The method of a Shadowsocks inbound without clients, which is converted to one nameless user with it."""
    if protocol != "shadowsocks" or not users.users:
        return ""
    cipher = xray_pb2.ShadowsocksAccount.FromString(users.users[0].account.value).cipher_type
    return {5: "aes-128-gcm", 6: "aes-256-gcm", 8: "xchacha20-poly1305"}.get(cipher, "")


def _uncounted(inbounds: Iterable[Inbound], version: Version) -> frozenset[Scope]:
    """26.3.27 does not count Hysteria's users where inbounds are counted (Xray-core issue 5868)."""
    hysteria = any(inbound.protocol == "hysteria" for inbound in inbounds)
    return frozenset({Scope.INBOUND} if hysteria and version <= HYSTERIA_MISCOUNTED else ())


def measures(base: Config) -> bool:
    """Whether it has an observatory, which measures outbounds; without one the core does not start with its service."""
    return any(app.type in messages.OBSERVATORIES for app in base.app)


def _add_api(config: Config, api: ApiAddress) -> None:
    commander = xray_pb2.CommanderConfig(tag=api.outbound)
    services = [*API_SERVICES, *(["xray.core.app.observatory.command.Config"] if measures(config) else [])]
    commander.service.extend(TypedMessage(type=service) for service in services)
    if api.direct:
        commander.listen = f"{api.socket},0600"
    else:
        _add_api_inbound(config, api)
    config.app.append(TypedMessage(type=messages.COMMANDER, value=commander.SerializeToString()))


def _add_api_inbound(config: Config, api: ApiAddress) -> None:
    """Add the API for a core whose `api.listen` takes no unix socket: an inbound on one, and the first routing rule."""
    receiver = xray_pb2.ReceiverConfig(listen=xray_pb2.IPOrDomain(domain=f"{api.socket},0600"))
    loopback = xray_pb2.IPOrDomain(ip=bytes([127, 0, 0, 1]))
    dokodemo = xray_pb2.DokodemoConfig(address=loopback, port=1, networks=[_UNIX])
    config.inbound.append(
        InboundHandlerConfig(
            tag=api.inbound,
            receiver_settings=TypedMessage(type="xray.app.proxyman.ReceiverConfig", value=receiver.SerializeToString()),
            proxy_settings=TypedMessage(type=messages.DOKODEMO, value=dokodemo.SerializeToString()),
        )
    )
    rule = xray_pb2.RoutingRule(tag=api.outbound, inbound_tag=[api.inbound], rule_tag=rules.own_tag(api.token))
    _put_first(config, xray_pb2.RouterConfig(rule=[rule]).SerializeToString())


def _put_first(config: Config, settings: bytes) -> None:
    """Put these settings before the router's own: concatenated messages are merged."""
    router = rules.router_app(config)
    router.value = settings + router.value
