"""What keeps users of Xray from the server: what the node adds to a configuration, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from drivers.process.closed import SERVER, Closed
from drivers.xray import messages, rules
from drivers.xray.closed import Closing, text_of
from drivers.xray.config import Plan, plan
from drivers.xray.driver import Xray
from drivers.xray.overrides import BLACKHOLE
from node.base.logs import LogRing
from node.contract.driver import Host
from node.contract.routing import Routing
from protos.xray_pb2 import DnsConfig, FreedomConfig, NameServer, RoutingRule, SenderConfig
from scripts.staging.core import xray_number
from tests.harness.convert import accepts, convert
from tests.harness.rendering import rendered

pytestmark = pytest.mark.core
CLOSED = Closed(SERVER, ("192.0.2.10",), (62050,), interface="eth0")
YIELDS = Closed(SERVER, yields=True, interface="eth0")
DIRECT = {"protocol": "freedom", "tag": "direct"}
BARE = "~txnode-bare"
# Routes of the node's own rules: for closed networks, and for the node's ports.
BLOCKED = [BLACKHOLE, BLACKHOLE]


def planned(closed: Closed = CLOSED, **config: Any) -> Plan:
    """A plan that the core accepts."""
    text = json.dumps({"outbounds": [DIRECT], **config})
    made = plan(convert(text), text, frozenset(), xray_number(), closing=Closing(closed, convert(text_of(closed))))
    assert accepts(rendered(made).SerializeToString()) == ""
    return made


def routes(made: Plan) -> list[str]:
    return [rule.tag for rule in rules.rules_of(made.base)]


def exempt(made: Plan) -> RoutingRule:
    """The first rule, which lets a closed target through."""
    return rules.rules_of(made.base)[0]


def freedom(made: Plan, number: int = 0) -> FreedomConfig:
    return FreedomConfig.FromString(made.base.outbound[number].proxy_settings.value)


def interface(made: Plan, number: int = 0) -> str:
    sender = SenderConfig.FromString(made.base.outbound[number].sender_settings.value)
    return sender.stream_settings.socket_settings.interface


def dns(made: Plan) -> DnsConfig:
    return DnsConfig.FromString(next(app.value for app in made.base.app if app.type == messages.DNS))


def ours() -> NameServer:
    """The node's own server in the core's DNS, which asks the system."""
    return dns(planned()).name_server[0]


def checks_each_packet(made: Plan) -> bool:
    """Whether this core has `finalRules`; then it gets nothing else."""
    return len(freedom(made).final_rules) > 0


def test_by_default() -> None:
    """Rules come first, names are resolved by the core's own DNS, and the outbound is bound; or `finalRules`."""
    made = planned(routing={"rules": [{"port": "443", "outboundTag": "direct"}]})
    assert routes(made) == [*BLOCKED, "direct"]
    if checks_each_packet(made):
        assert (interface(made), freedom(made).domain_strategy) == ("", 0)
    else:
        assert (interface(made), freedom(made).domain_strategy) == ("eth0", 9)
        [server] = dns(made).name_server
        assert server.unexpected == ours().unexpected
    assert made.notes[0].startswith("PROXY_TO_SERVER=block: users do not reach 127.0.0.0/8")


def test_open() -> None:
    """Without the setting the configuration is as before."""
    text = json.dumps({"outbounds": [DIRECT]})
    assert planned(Closed()).base == plan(convert(text), text, frozenset(), xray_number()).base


def test_other_outbounds() -> None:
    """A proxy has nothing to do with it, and a fixed target is the operator's."""
    fixed = {"protocol": "freedom", "tag": "fixed", "settings": {"redirect": "127.0.0.1:80"}}
    made = planned(outbounds=[fixed, {"protocol": "blackhole", "tag": "block"}])
    assert (interface(made), freedom(made).domain_strategy, len(freedom(made).final_rules)) == ("", 0, 0)


@pytest.mark.parametrize("target", [":80", "0.0.0.0:80", "[::]:80"])
def test_a_fixed_port(target: str) -> None:
    """Users choose the address where an outbound sets the port only."""
    made = planned(outbounds=[{**DIRECT, "settings": {"redirect": target}}])
    assert checks_each_packet(made) or (interface(made), freedom(made).domain_strategy) == ("eth0", 9)


def test_own_interface() -> None:
    own = {**DIRECT, "streamSettings": {"sockopt": {"interface": "wg0"}}}
    assert interface(planned(outbounds=[own])) == "wg0"


@pytest.mark.parametrize(("chosen", "forced"), [("UseIP", 6), ("UseIPv4", 7), ("ForceIPv6", 8), ("UseIPv6v4", 10)])
def test_strategies(chosen: str, forced: int) -> None:
    """An outbound must not ask the system where the core's DNS has no answer."""
    made = planned(outbounds=[{**DIRECT, "settings": {"domainStrategy": chosen}}])
    if not checks_each_packet(made):
        assert freedom(made).domain_strategy == forced


def test_without_ipv4() -> None:
    made = planned(Closed(SERVER, without_ipv4=True))
    if not checks_each_packet(made):
        assert freedom(made).domain_strategy == 10


def test_own_dns() -> None:
    """Each of its servers leaves closed addresses out, and a server of this machine can still be asked."""
    servers = ["127.0.0.53", {"address": "1.1.1.1", "unexpectedIPs": ["*", "192.0.2.1"]}, "https+local://127.0.0.1/dns"]
    hosts = {"loop.test": "127.0.0.1", "both.test": ["127.0.0.1", "192.0.2.1"], "far.test": "192.0.2.1"}
    made = planned(dns={"servers": servers, "hosts": hosts})
    assert routes(made) == [BARE, *BLOCKED]
    assert list(exempt(made).inbound_tag) == [dns(made).tag] == ["~txnode-dns"]
    if not checks_each_packet(made):
        assert all(server.unexpected == ours().unexpected for server in dns(made).name_server)
        assert not any(server.unprior for server in dns(made).name_server)
        found = sorted((host.proxied_domain, len(host.ip)) for host in dns(made).static_hosts)
        # The last one is for names that are too long.
        assert found == [("", 1), ("", 1), ("#3", 0), ("#3", 0)]


def test_dns_without_a_fallback() -> None:
    """If no server is for all names, those that it does not know are asked from the system, as before."""
    made = planned(dns={"servers": [{"address": "1.1.1.1", "domains": ["a.test"], "skipFallback": True}]})
    if not checks_each_packet(made):
        assert dns(made).name_server[-1].address.address.domain == "localhost"


def test_fake_dns() -> None:
    """It has no answer for outbounds."""
    made = planned(dns={"servers": ["fakedns"]}, fakedns=[{"ipPool": "198.18.0.0/15", "poolSize": 100}])
    if not checks_each_packet(made):
        assert [server.address.address.domain for server in dns(made).name_server] == ["fakedns", "localhost"]


@pytest.mark.parametrize("server", ["https://dns.test/dns-query", "tcp://dns.test", "dns.test"])
def test_dns_by_name(server: str) -> None:
    """The system resolves the name of a server, which the core's DNS would ask itself."""
    made = planned(dns={"servers": [server, "192.0.2.1"]})
    if not checks_each_packet(made):
        first, *others = dns(made).name_server
        assert [server.address.address.domain for server in others] == [server, ""]
        assert first.address.address.domain == "localhost"
        assert (first.skip_fallback, first.final_query, first.unexpected) == (True, True, ours().unexpected)
        [name] = first.domain
        assert name.endswith(b"dns.test")


@pytest.mark.parametrize("server", ["https://192.0.2.1/dns-query", "https+local://dns.test/dns-query", "localhost"])
def test_dns_by_address(server: str) -> None:
    made = planned(dns={"servers": [server]})
    assert len(dns(made).name_server) == 1


def test_dns_by_a_proxy() -> None:
    """The way to a DNS server may lead by a proxy, which the core cannot find by asking that server."""
    proxy = {"tag": "far", "protocol": "socks", "settings": {"servers": [{"address": "far.test", "port": 1080}]}}
    made = planned(dns={"servers": ["192.0.2.1"]}, outbounds=[proxy, DIRECT])
    if not checks_each_packet(planned()):
        first, _ = dns(made).name_server
        assert first.final_query and [name[-8:] for name in first.domain] == [b"far.test"]


def test_a_broken_url() -> None:
    """It is the core's to refuse."""
    text = json.dumps({"outbounds": [DIRECT], "dns": {"servers": ["https://[::1"]}})
    plan(convert(text), text, frozenset(), xray_number(), closing=Closing(CLOSED, convert(text_of(CLOSED))))


DOOR = {"tag": "door", "port": 5000, "protocol": "dokodemo-door", "settings": {"address": "127.0.0.1", "port": 80}}


def test_fixed_targets() -> None:
    """An inbound with a fixed target of this machine leads there as before."""
    made = planned(inbounds=[DOOR, {**DOOR, "tag": "far", "port": 5001, "settings": {"address": "192.0.2.1"}}])
    assert routes(made) == [BARE, *BLOCKED]
    assert list(exempt(made).inbound_tag) == ["door"]


def test_a_tunnel() -> None:
    """Its fixed target is the loopback of another server: it keeps its way."""
    far = {"protocol": "socks", "tag": "far", "settings": {"servers": [{"address": "192.0.2.1", "port": 1080}]}}
    rule = {"inboundTag": ["door"], "outboundTag": "far"}
    made = planned(inbounds=[DOOR], outbounds=[DIRECT, far], routing={"rules": [rule]})
    assert routes(made) == ["far", *BLOCKED, "far"]


def test_a_fixed_target_that_is_another() -> None:
    """The inbound's own target is a placeholder: its outbound has one."""
    fixed = {"protocol": "freedom", "tag": "fixed", "settings": {"redirect": "127.0.0.1:81"}}
    rule = {"inboundTag": ["door"], "outboundTag": "fixed"}
    made = planned(inbounds=[DOOR], outbounds=[DIRECT, fixed], routing={"rules": [rule]})
    assert routes(made) == ["fixed", *BLOCKED, "fixed"]


ON_PURPOSE = {"ip": ["127.0.0.9"], "outboundTag": "inner"}
INNER = {"protocol": "freedom", "tag": "inner"}


@pytest.mark.parametrize("named", [ON_PURPOSE, {"domain": ["full:localhost"], "outboundTag": "inner"}])
def test_own_rules_first(named: dict[str, Any]) -> None:
    """With `rules`, those that name a closed target come first, with what stands before them."""
    own = [{"port": "1", "outboundTag": "direct"}, named, {"port": "2", "outboundTag": "direct"}]
    made = planned(YIELDS, outbounds=[DIRECT, INNER], routing={"rules": own})
    assert routes(made) == ["direct", "inner", BLACKHOLE, "direct"]
    if not checks_each_packet(made) and named is ON_PURPOSE:
        assert (interface(made), interface(made, 1)) == ("eth0", "")
        assert len(made.warnings) > len(planned(YIELDS).warnings)


def test_own_rules_with_block() -> None:
    made = planned(outbounds=[DIRECT, INNER], routing={"rules": [ON_PURPOSE]})
    assert routes(made) == [*BLOCKED, "inner"]


def test_rules_that_change() -> None:
    """The node's rules stay where they are while a controller changes its own, and have no public name."""
    made = planned(YIELDS, outbounds=[DIRECT, INNER], routing={"rules": [{**ON_PURPOSE, "ruleTag": "own"}]})
    cleared = rules.changed(made.base, Routing(cleared=True), [])
    assert [rule.tag for rule in rules.rules_of(cleared)] == [BLACKHOLE]
    assert rules.tags_of(made.base) == {"own"}


def test_the_next_node_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core converts the rules once for all configurations, and again to leave them to the next process."""
    clock: Any = Clock()
    driver, asked = Xray(Host(clock, LogRing(clock, 1), Path(), {})), list[object]()
    xray: Any = SimpleNamespace(path=Path("xray"), changed=1)

    async def converted(*some: object) -> bytes:
        asked.append(some)
        return b""

    monkeypatch.setattr(driver, "converted", converted)
    for begin, times in (None, 1), (None, 1), (True, 2), (False, 2):
        if begin is not None:
            driver.rehearse(begin)
        Deferred.fromCoroutine(driver._closing(xray))
        assert len(asked) == times


def test_own_final_rules() -> None:
    """With `block` the node's `finalRules` come first, with `rules` the configuration's own."""
    own = [{**DIRECT, "settings": {"finalRules": [{"action": "allow"}]}}]
    block, yields = planned(outbounds=own), planned(YIELDS, outbounds=own)
    if checks_each_packet(block):
        assert (freedom(block).final_rules[-1], freedom(yields).final_rules[0]) == (b"", b"")
