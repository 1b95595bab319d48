"""What the node adds to a controller's configuration and what it takes over. Pure: core.Config in, core.Config out.

The controller's text was converted by the core itself (`xray convert pb`), so all names here are canonical and nothing
that is not named here is touched: unknown fields stay as they came. Type names and numbers: Xray-core 26.3.27.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from drivers.credentials import KEY_BYTES, require_usable
from drivers.process.known import NOTHING_MORE, Allowed
from drivers.xray import exclusive, guard, known, latency, rules, selectors, streams, taken, traps, unix, wireguard
from drivers.xray.access import Shown
from drivers.xray.accounts import BUILDERS, Inbound
from drivers.xray.doors import Door, doors, entrances, is_over_udp, is_transparent, listens
from drivers.xray.reloading import have_reloaded
from drivers.xray.selectors import OURS
from drivers.xray.text import Hints, hints
from drivers.xray.wire import field
from node.contract.accounts import Account, Accounts
from node.contract.counters import Scope
from node.contract.routing import Routing
from node.errors import InvalidConfig
from protos import service_pb2, xray_pb2
from protos.xray_pb2 import Config, InboundHandlerConfig, OutboundHandlerConfig, TypedMessage

BLACKHOLE = "xray.proxy.blackhole.Config"
DOKODEMO = "xray.proxy.dokodemo.Config"
SHADOWSOCKS_2022 = "xray.proxy.shadowsocks_2022.MultiUserServerConfig"
SHADOWSOCKS_2022_SINGLE = "xray.proxy.shadowsocks_2022.ServerConfig"
# The inbounds whose users the node can build and enforce, by the type of their settings.
PROTOCOLS = {
    "xray.proxy.vless.inbound.Config": "vless",
    "xray.proxy.vmess.inbound.Config": "vmess",
    "xray.proxy.trojan.ServerConfig": "trojan",
    "xray.proxy.shadowsocks.ServerConfig": "shadowsocks",
    "xray.proxy.hysteria.ServerConfig": "hysteria",
    SHADOWSOCKS_2022: "shadowsocks_2022",
}
# Types that have users of a kind that this core cannot change while it runs, or not tell apart.
UNSUPPORTED = {
    wireguard.SETTINGS: "WireGuard peers can be supplied as users from Xray 26.6.27 on",
    SHADOWSOCKS_2022_SINGLE: "this Shadowsocks-2022 method has one shared key and no users",
    "xray.proxy.shadowsocks_2022.RelayServerConfig": "a Shadowsocks-2022 relay has destinations, not users",
}
SHADOWSOCKS = ("xray.proxy.shadowsocks.ServerConfig", SHADOWSOCKS_2022, SHADOWSOCKS_2022_SINGLE)
API_SERVICES = (
    "xray.app.proxyman.command.Config",
    "xray.app.stats.command.Config",
    "xray.app.router.command.Config",
)
OBSERVATORY_SERVICE = "xray.core.app.observatory.command.Config"
Version = tuple[int, ...]
HYSTERIA_MISCOUNTED: Version = (26, 3, 27)
_UNIX = 4
# Where settings have their users, if not in the first field.
_USERS = {"shadowsocks_2022": b"\x1a", "wireguard": b"\x2a"}


@dataclass(frozen=True)
class Plan:
    """A configuration without users and without the node's API, and what is known of its managed inbounds.

    `doors` is where their users come in, `shown` what the controller asked to see of the core's lines. `routing` is
    what was changed of the rules, and in `base` already, `first` the settings of the router that go before all others.
    """

    base: Config
    inbounds: Mapping[str, Inbound]
    warnings: tuple[str, ...]
    uncounted: frozenset[Scope]
    doors: Mapping[str, Door]
    shown: Shown
    routing: Routing = Routing()  # noqa: RUF009  it is frozen, too
    first: bytes = b""

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self.inbounds)

    @property
    def ports(self) -> tuple[range, ...]:
        """Where inbounds listen."""
        return entrances(self.base.inbound)

    @property
    def listens(self) -> Mapping[int, frozenset[bytes]]:
        """By port at which addresses they do, and with which options."""
        return listens(self.base.inbound)

    @property
    def datagrams(self) -> frozenset[int]:
        """The ports where datagrams stand for themselves, if any come."""
        some = [handler for handler in self.base.inbound if handler.proxy_settings.type in (*SHADOWSOCKS, DOKODEMO)]
        return frozenset(listens(each for each in some if not (is_over_udp(each) or is_transparent(each))))

    @property
    def sessions(self) -> frozenset[int]:
        """The ports where clients have sessions by UDP."""
        return frozenset(listens(filter(is_over_udp, self.base.inbound)))

    @property
    def measures(self) -> bool:
        """Whether the core measures outbounds."""
        return latency.measures(self.base)

    @property
    def exclusive(self) -> Sequence[str]:
        """What of it only one process at a time can have, or another one would have too late, in words."""
        return list(exclusive.exclusive(self.base, self.inbounds))

    def account(self, tag: str, user: service_pb2.User) -> Account | None:
        inbound = self.inbounds[tag]
        account = BUILDERS[inbound.protocol](inbound, user)
        if account is None:
            require_usable(user)
        return account

    def handler(self, tag: str, accounts: Accounts) -> InboundHandlerConfig:
        """A managed inbound with these users."""
        handler = InboundHandlerConfig()
        handler.CopyFrom(next(inbound for inbound in self.base.inbound if inbound.tag == tag))
        handler.proxy_settings.value += users_field(self.inbounds[tag].protocol, accounts.values())
        return handler


@dataclass(frozen=True)
class Endpoint:
    """Where one run of the core has its API, and names that only it knows. `direct`: the core can listen itself."""

    socket: str
    token: str
    direct: bool

    @property
    def inbound(self) -> str:
        return f"{OURS}in-{self.token}"

    @property
    def outbound(self) -> str:
        return f"{OURS}api-{self.token}"


def plan(
    converted: bytes,
    text: str,
    exclude: frozenset[str],
    version: Version = HYSTERIA_MISCOUNTED,
    allowed: Allowed = NOTHING_MORE,
) -> Plan:
    """Take over a configuration that was converted from `text`.

    Raises `InvalidConfig` for what would kill the core, and for what is neither known nor allowed.
    """
    try:
        base = Config.FromString(converted)
        known.judge(base, text, version, allowed)
        for address, where in unix.sockets(base):
            allowed.judge_socket(address, where)
        return _planned(base, text, exclude, version)
    except DecodeError as error:
        # Another version of the core may have another meaning of what the node reads.
        raise InvalidConfig("the node cannot read what this core makes of the configuration") from error


def rerouted(
    plan: Plan, routing: Routing, converted: bytes, text: str, version: Version, allowed: Allowed = NOTHING_MORE
) -> Plan:
    """The plan, as it was prepared, with these changes of its rules; `converted` is what the core made of `text`.

    Raises as `rules.added` and `rules.changed`, and `InvalidConfig` for what is neither known nor allowed.
    """
    base = Config.FromString(converted)
    known.judge(base, text, version, allowed)
    for address, where in unix.sockets(base):
        allowed.judge_socket(address, where)
    found = rules.added(base, routing)
    tags = [rules.public(rule.rule_tag) for rule in found]
    tagged = tuple(each._replace(tag=tag) for each, tag in zip(routing.added, tags, strict=True))
    changed = rules.changed(plan.base, routing, found)
    have_reloaded(changed, text, version)
    return replace(plan, base=changed, routing=replace(routing, added=tagged))


def _planned(base: Config, text: str, exclude: frozenset[str], version: Version) -> Plan:
    inbounds: dict[str, Inbound] = {}
    warnings = list(traps.traps(base, text, version))
    for handler, hint in zip(base.inbound, hints(text, len(base.inbound)), strict=True):
        _refuse_deadly(handler)
        streams.take_over_receiver(handler)
        managed = None if handler.tag in exclude else _manage(handler, hint, warnings, version)
        if managed is not None:
            inbounds[managed.tag] = managed
        elif handler.proxy_settings.type in (*PROTOCOLS, SHADOWSOCKS_2022_SINGLE):
            warnings.extend(filter(None, [traps.unread(handler, hint, version)]))
    for outbound in base.outbound:
        streams.take_over_sender(outbound)
    if not base.outbound:
        # The first outbound is the default one. Without any it would be the API's.
        base.outbound.append(OutboundHandlerConfig(tag="", proxy_settings=TypedMessage(type=BLACKHOLE)))
    uncounted = _uncounted(inbounds.values(), version)
    if uncounted:
        warnings.append("inbounds are not counted: beside a Hysteria inbound this Xray would count its users as 0")
    shown = taken.take_over(base, count_inbounds=not uncounted)
    selectors.bind(base)
    _name_outbounds(base)
    rules.name_rules(base)
    have_reloaded(base, text, version)
    first = guard.protect(base, version)
    if first:
        warnings.append(guard.WARNING.format(".".join(map(str, version))))
    return Plan(base, inbounds, tuple(warnings), uncounted, doors(base.inbound, inbounds), shown, first=first)


def render(plan: Plan, api: Endpoint, accounts: Mapping[str, Accounts]) -> bytes:
    """The serialised configuration of one run: the plan, its users, the API."""
    config = Config()
    config.CopyFrom(plan.base)
    for handler in config.inbound:
        if handler.tag in plan.inbounds:
            protocol = plan.inbounds[handler.tag].protocol
            handler.proxy_settings.value += users_field(protocol, accounts[handler.tag].values())
    _add_api(config, api)
    _put_first(config, plan.first)
    return config.SerializeToString()


def users_field(protocol: str, accounts: Iterable[bytes]) -> bytes:
    """Users as they stand in an inbound's settings: appended there they are its users (repeated fields add up)."""
    tag = _USERS.get(protocol, b"\x0a")
    return b"".join([field(tag, account) for account in accounts])


def _refuse_deadly(handler: InboundHandlerConfig) -> None:
    if handler.proxy_settings.type == DOKODEMO:
        settings = xray_pb2.DokodemoConfig.FromString(handler.proxy_settings.value)
        if _UNIX in settings.networks and not settings.port:
            raise InvalidConfig(
                f"inbound {handler.tag!r}: a dokodemo-door on a unix socket needs a port in its settings; "
                "without one the first connection would end the core"
            )


def _manage(handler: InboundHandlerConfig, hint: Hints, warnings: list[str], version: Version) -> Inbound | None:
    """Strip an inbound's own users and say how to build the supplied ones; None leaves it as it is."""
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
        return _manage_shadowsocks_2022(handler)
    if protocol == "wireguard":
        return Inbound(handler.tag, protocol, key=wireguard.strip(handler))
    users = xray_pb2.UsersConfig.FromString(settings.value)
    method = hint.method or _method_of(users, protocol)
    users.ClearField("users")
    settings.value = users.SerializeToString()
    if protocol == "hysteria":
        streams.strip_shared_password(handler)
    vision = protocol == "vless" and streams.carries_vision(handler)
    return Inbound(handler.tag, protocol, vision, hint.flow if vision else "", method)


def _promote_to_multi_user(settings: TypedMessage) -> None:
    """Without clients the core's parser makes the single-user server, which lets in whoever knows the server's key."""
    if settings.type != SHADOWSOCKS_2022_SINGLE:
        return
    single = xray_pb2.Shadowsocks2022ServerConfig.FromString(settings.value)
    if single.method in KEY_BYTES:
        multi = xray_pb2.Shadowsocks2022MultiUserConfig(method=single.method, key=single.key, network=single.network)
        settings.type, settings.value = SHADOWSOCKS_2022, multi.SerializeToString()


def _manage_shadowsocks_2022(handler: InboundHandlerConfig) -> Inbound:
    multi = xray_pb2.Shadowsocks2022MultiUserConfig.FromString(handler.proxy_settings.value)
    multi.ClearField("users")
    handler.proxy_settings.value = multi.SerializeToString()
    return Inbound(handler.tag, "shadowsocks_2022", method=multi.method)


def _method_of(users: xray_pb2.UsersConfig, protocol: str) -> str:
    """A Shadowsocks inbound without clients is converted to one nameless user who has its method."""
    if protocol != "shadowsocks" or not users.users:
        return ""
    cipher = xray_pb2.ShadowsocksAccount.FromString(users.users[0].account.value).cipher_type
    return {5: "aes-128-gcm", 6: "aes-256-gcm", 8: "xchacha20-poly1305"}.get(cipher, "")


def _uncounted(inbounds: Iterable[Inbound], version: Version) -> frozenset[Scope]:
    """Where inbounds are counted, 26.3.27 does not find Hysteria's user behind the counter (Xray-core issue 5868)."""
    hysteria = any(inbound.protocol == "hysteria" for inbound in inbounds)
    return frozenset({Scope.INBOUND} if hysteria and version <= HYSTERIA_MISCOUNTED else ())


def _name_outbounds(base: Config) -> None:
    """Give each outbound a tag: without one the core's access lines do not say by which inbound a user came."""
    for number, outbound in enumerate(base.outbound):
        outbound.tag = outbound.tag or f"{OURS}out-{number}"


def _add_api(config: Config, api: Endpoint) -> None:
    commander = xray_pb2.CommanderConfig(tag=api.outbound)
    services = [*API_SERVICES, *([OBSERVATORY_SERVICE] if latency.measures(config) else [])]
    commander.service.extend(TypedMessage(type=service) for service in services)
    if api.direct:
        commander.listen = f"{api.socket},0600"
    else:
        _add_api_inbound(config, api)
    config.app.append(TypedMessage(type=taken.COMMANDER, value=commander.SerializeToString()))


def _add_api_inbound(config: Config, api: Endpoint) -> None:
    """The API of a core that cannot listen on a unix socket itself: an inbound that can, and the first routing rule.

    Without a port the first connection would end the core.
    """
    receiver = xray_pb2.ReceiverConfig(listen=xray_pb2.IPOrDomain(domain=f"{api.socket},0600"))
    loopback = xray_pb2.IPOrDomain(ip=bytes([127, 0, 0, 1]))
    dokodemo = xray_pb2.DokodemoConfig(address=loopback, port=1, networks=[_UNIX])
    config.inbound.append(
        InboundHandlerConfig(
            tag=api.inbound,
            receiver_settings=TypedMessage(type="xray.app.proxyman.ReceiverConfig", value=receiver.SerializeToString()),
            proxy_settings=TypedMessage(type=DOKODEMO, value=dokodemo.SerializeToString()),
        )
    )
    rule = xray_pb2.RoutingRule(tag=api.outbound, inbound_tag=[api.inbound], rule_tag=rules.own_tag(api.token))
    _put_first(config, xray_pb2.RouterConfig(rule=[rule]).SerializeToString())


def _put_first(config: Config, settings: bytes) -> None:
    """Have these settings of the router before its own: concatenated messages are merged."""
    router = next(app for app in config.app if app.type == taken.ROUTER)
    router.value = settings + router.value
