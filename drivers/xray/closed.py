"""Keep users from the server itself: the rules and settings that the node adds to a configuration. Pure.

A routing rule blocks closed addresses as targets, on every core. From 26.5.3 on the freedom outbounds also check what a
name resolves to, and each packet of a UDP session (`finalRules`). Older cores get the same for names from their DNS,
which then leaves closed addresses out of its answers, and are bound to an interface for later packets. The core itself
converts the rules, since the encoding of addresses depends on its version.

Numbers of strategies: `transport/internet/config.proto`; how outbounds resolve: `proxy/freedom/freedom.go` of Xray-core
26.3.27 and 26.7.28.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from drivers.process.closed import Closed, Effect
from drivers.xray import messages, overrides, rules
from drivers.xray.messages import OURS, Version, edited
from drivers.xray.text import private_rules, private_targets, servers
from protos import xray_pb2
from protos.xray_pb2 import (
    Config,
    DnsConfig,
    FreedomConfig,
    NameServer,
    OutboundHandlerConfig,
    RouterConfig,
    RoutingRule,
)

# A freedom outbound without any of this, for the core's own DNS and for inbounds with a fixed target.
BARE = f"{OURS}bare"
_DNS = f"{OURS}dns"
# Strategies that ask the core's DNS, and fail if it does not answer, by those that may ask the system.
_FORCED = {1: 6, 2: 7, 3: 8, 4: 9, 5: 10}
_IPV4_FIRST, _IPV6_FIRST = 9, 10


def text_of(closed: Closed) -> str:
    """A configuration with what the node adds, for the core to convert."""
    closing: list[dict[str, object]] = [{"ip": [*closed.networks]}]
    if closed.own:
        closing.append({"ip": [*closed.own], "port": ",".join(map(str, closed.ports))})
    final = [{"action": "block", "blockDelay": "0-0", **each} for each in closing]
    tags = {"outboundTag": overrides.BLACKHOLE, "ruleTag": ""}
    named = [{**tags, "ruleTag": rules.own_tag(f"closed-{number}"), **each} for number, each in enumerate(closing)]
    return json.dumps(
        {
            "outbounds": [{"protocol": "freedom", "settings": {"finalRules": final}}],
            "routing": {"rules": named},
            "dns": {"servers": [{"address": "localhost", "unexpectedIPs": [*closed.networks]}]},
        }
    )


class _Added(NamedTuple):
    """What the core made of `text_of`. `final` is empty if it does not know `finalRules`."""

    rules: Sequence[RoutingRule]
    final: Sequence[bytes]
    dns: bytes

    @classmethod
    def of(cls, converted: bytes) -> _Added:
        base = Config.FromString(converted)
        final = FreedomConfig.FromString(base.outbound[0].proxy_settings.value).final_rules
        dns = next(app.value for app in base.app if app.type == messages.DNS)
        return cls(rules.rules_of(base), list(final), dns)


@dataclass(frozen=True)
class Closing:
    """What a configuration gets: `converted` is what the core made of `text_of(closed)`."""

    closed: Closed = Closed()
    converted: bytes = b""

    def close(self, base: Config, source: str, version: Version) -> Effect:
        """Close a configuration whose rules have tags. `source` is the controller's text."""
        closed = self.closed
        if not closed:
            return Effect()
        added = _Added.of(self.converted)
        _add_rules(base, closed, source, added.rules)
        if added.final:
            for outbound in _leaving(base):
                _add_final(outbound, added.final, closed.yields)
            return Effect.of(closed)
        # Bound to an interface, these would not reach the targets that rules send there on purpose.
        on_purpose = private_targets(source) if closed.yields else frozenset()
        for outbound in _leaving(base):
            _resolve_closed(outbound, closed)
            if outbound.tag not in on_purpose:
                _bind(outbound, closed.interface)
        _close_dns(base, closed, added.dns, servers(source), version)
        return Effect.of(closed, first_only=True, all_bound=not on_purpose)


OPEN = Closing()


def _leaving(base: Config) -> Iterator[OutboundHandlerConfig]:
    """The outbounds by which users' traffic leaves to targets that users choose."""
    for outbound in base.outbound:
        settings = outbound.proxy_settings
        is_one = settings.type == messages.FREEDOM and outbound.tag != BARE
        if is_one and not _is_fixed(FreedomConfig.FromString(settings.value)):
            yield outbound


def _is_fixed(freedom: FreedomConfig) -> bool:
    """Whether it redirects to another address; `:80` and `0.0.0.0:80` set the port only."""
    address = freedom.destination_override.server.address
    return any(address.ip) or bool(address.domain)


def _add_rules(base: Config, closed: Closed, source: str, closing: Sequence[RoutingRule]) -> None:
    overrides.add_blackhole(base)
    exempt = _exempt(base, closed, closing[0])
    with edited(rules.router_app(base), RouterConfig) as router:
        own = list(router.rule)
        first = max((number + 1 for number in private_rules(source) if closed.yields), default=0)
        del router.rule[:]
        router.rule.extend([*own[:first], *exempt, *closing, *own[first:]])


def _exempt(base: Config, closed: Closed, closing: RoutingRule) -> list[RoutingRule]:
    """The rules for closed targets that no user chooses: local servers of the core's DNS, and fixed targets."""
    leaving = [each.tag for each in _leaving(base)]
    found: list[RoutingRule] = []
    for number, tag in enumerate(dict.fromkeys([*_local_dns(base, closed), *_fixed(base, closed)])):
        rule = RoutingRule()
        rule.CopyFrom(closing)
        own = next((each for each in rules.rules_of(base) if tag in each.inbound_tag), RoutingRule())
        # A tunnel may lead to the loopback of another server.
        rule.tag = own.tag if own.tag and own.tag not in leaving else "" if own.balancing_tag else BARE
        rule.balancing_tag = own.balancing_tag
        rule.inbound_tag.append(tag)
        rule.rule_tag = rules.own_tag(f"exempt-{number}")
        found.append(rule)
    if any(rule.tag == BARE for rule in found):
        bare = xray_pb2.TypedMessage(type=messages.FREEDOM)
        base.outbound.append(OutboundHandlerConfig(tag=BARE, proxy_settings=bare))
    return found


def _local_dns(base: Config, closed: Closed) -> Iterator[str]:
    """The inbound tags of DNS servers at closed addresses that the core asks by way of its router."""
    for app in base.app:
        if app.type == messages.DNS:
            with edited(app, DnsConfig) as dns:
                dns.tag = dns.tag or _DNS
                for server in dns.name_server:
                    if _is_local(server.address.address, closed):
                        yield server.tag or dns.tag


def _is_local(address: xray_pb2.IPOrDomain, closed: Closed) -> bool:
    if address.ip:
        return closed.covers(str(ip_address(address.ip)))
    # The core asks `localhost`, and URLs with `+local`, without the router.
    url = _url(address.domain)
    return bool(url.hostname) and "+local" not in url.scheme and _is_closed_host(url.hostname or "", closed)


def _is_closed_host(host: str, closed: Closed) -> bool:
    return host == "localhost" or closed.covers(host)


def _fixed(base: Config, closed: Closed) -> Iterator[str]:
    """The tags of inbounds whose clients do not choose the target, which is closed."""
    for inbound in base.inbound:
        if inbound.tag and inbound.proxy_settings.type == messages.DOKODEMO:
            settings = xray_pb2.DokodemoConfig.FromString(inbound.proxy_settings.value)
            target = settings.address
            host = str(ip_address(target.ip)) if target.ip else target.domain
            if not settings.follow_redirect and _is_closed_host(host, closed):
                yield inbound.tag


def _add_final(outbound: OutboundHandlerConfig, final: Sequence[bytes], yields: bool) -> None:
    with edited(outbound.proxy_settings, FreedomConfig) as freedom:
        own = list(freedom.final_rules)
        del freedom.final_rules[:]
        freedom.final_rules.extend([*own, *final] if yields else [*final, *own])


def _resolve_closed(outbound: OutboundHandlerConfig, closed: Closed) -> None:
    """Have an outbound ask only the core's DNS for names."""
    first = _IPV6_FIRST if closed.without_ipv4 else _IPV4_FIRST
    with edited(outbound.proxy_settings, FreedomConfig) as freedom:
        chosen = freedom.domain_strategy
        freedom.domain_strategy = _FORCED.get(chosen, chosen or first)


def _bind(outbound: OutboundHandlerConfig, interface: str) -> None:
    if interface:
        outbound.sender_settings.type = messages.SENDER
        with edited(outbound.sender_settings, xray_pb2.SenderConfig) as sender:
            sockets = sender.stream_settings.socket_settings
            if not sockets.interface and not sockets.dialer_proxy:
                sockets.interface = interface


def _close_dns(base: Config, closed: Closed, ours: bytes, others: Sequence[str], version: Version) -> None:
    """Leave closed addresses out of the answers of the core's DNS. `ours` has a server that asks the system.

    The system resolves the names of DNS servers, and those of `others`, by which the core may ask them: to ask its own
    DNS, it would have to know them already.
    """
    apps = [app for app in base.app if app.type == messages.DNS]
    local = DnsConfig.FromString(ours).name_server[0]
    for app in apps:
        with edited(app, DnsConfig) as dns:
            asked = [*(server.address.address.domain for server in dns.name_server), *others]
            for server in dns.name_server:
                if server.unprior:
                    # These were to be left out only where there are others.
                    del server.unexpected[:]
                    server.unprior = False
                server.unexpected.extend(local.unexpected)
            if all(server.skip_fallback or _is_fake(server) for server in dns.name_server):
                dns.name_server.append(local)
            if names := [_full(name, version) for name in dict.fromkeys(filter(None, map(_name, asked)))]:
                first = NameServer(skip_fallback=True, final_query=True, domain=names)
                first.MergeFrom(local)
                all_ = [first, *dns.name_server]
                del dns.name_server[:]
                dns.name_server.extend(all_)
            for host in dns.static_hosts:
                _close_host(host, closed)
    if not apps:
        base.app.add(type=messages.DNS, value=ours)


def _is_fake(server: NameServer) -> bool:
    """Whether its answers are for the core itself, and not for outbounds."""
    return server.address.address.domain.lower() == "fakedns"


def _name(address: str) -> str:
    """The name of a server, from its address or URL; empty if it has none, or is asked without the router."""
    url = _url(address if "://" in address else f"//{address}")
    host = url.hostname or ""
    is_number = ":" in host or host.replace(".", "").isdigit()
    return "" if host in ("localhost", "fakedns") or "+local" in url.scheme or is_number else host


def _url(text: str) -> SplitResult:
    """The parts of a URL; without any if it is not valid."""
    try:
        return urlsplit(text)
    except ValueError:
        return urlsplit("")


def _full(name: str, version: Version) -> bytes:
    """NameServer.domain for a whole name. PriorityDomain: Full is 0; Domain: Full is 3; see `overrides.domain_rule`."""
    is_old = version < overrides.GEODATA
    return overrides.domain_rule(b"" if is_old else b"\x08\x03", name.encode(), version)


def _close_host(host: xray_pb2.HostMapping, closed: Closed) -> None:
    open_ = [ip for ip in host.ip if not _any_covers(ip, closed.networks)]
    if len(open_) < len(host.ip):
        del host.ip[:]
        host.ip.extend(open_)
        host.proxied_domain = "" if open_ else overrides.NO_SUCH_NAME


def _any_covers(packed: bytes, networks: Iterable[str]) -> bool:
    address = ip_address(packed)
    return any(address in ip_network(network) for network in networks)
