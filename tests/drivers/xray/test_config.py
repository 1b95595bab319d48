"""Changes to configurations: the API, users, counters and logs; on messages that the real core made."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.xray import config, messages
from drivers.xray.config import Plan, plan, render, users_field
from node.backend.roster import Roster
from node.base.errors import InvalidConfig
from protos import xray_pb2
from protos.xray_pb2 import Config, TypedMessage
from scripts.staging import certs
from scripts.staging.backend import user
from scripts.staging.core import Json
from scripts.staging.inbounds import NAMES, SERVER_NAME, Kind, kinds
from scripts.staging.users import TestUser
from tests.harness.convert import accepts, convert
from tests.harness.rendering import (
    FILE,
    ID,
    KEY,
    REALITY_SERVER,
    STREAMS,
    THROUGH_INBOUND,
    apps,
    clients,
    inbound,
    of,
    policy,
    rendered,
    taken_over,
    vless,
)

pytestmark = pytest.mark.core

# Apps


def test_other_apis_are_gone() -> None:
    """A controller's own API and metrics are removed, in any case of keys; only the node's API is left."""
    text = """{
        "Api": {"tag": "api", "listen": "127.0.0.1:1", "services": ["HandlerService", "ReflectionService"]},
        "METRICS": {"tag": "metrics", "listen": "127.0.0.1:2"}
    }"""
    assert {messages.COMMANDER, messages.METRICS} <= {app.type for app in Config.FromString(convert(text)).app}
    message = rendered(taken_over(text))
    assert apps(message, messages.METRICS) == []
    (app,) = apps(message, messages.COMMANDER)
    commander = xray_pb2.CommanderConfig.FromString(app.value)
    assert (commander.tag, commander.listen) == (THROUGH_INBOUND.outbound, "")
    assert [service.type for service in commander.service] == list(config.API_SERVICES)


def test_everything_is_counted() -> None:
    """Counting is on at every level, inbound and outbound, whatever the configuration has; other policies stay."""
    levels = {"0": {"handshake": 7, "statsUserUplink": False}, "5": {"connIdle": 9}}
    made = of(policy={"levels": levels, "system": {"statsInboundUplink": False}})
    counting = policy(made)
    assert set(counting.level) == {0, 5}
    for level in counting.level.values():
        assert (level.stats.user_uplink, level.stats.user_downlink, level.stats.user_online) == (True, True, True)
    system = counting.system.stats
    assert system.inbound_uplink and system.inbound_downlink and system.outbound_uplink and system.outbound_downlink
    (app,) = apps(made.base, messages.POLICY)
    for level_timeout in (b"\x0a\x02\x08\x07", b"\x08\x09"):
        assert level_timeout in app.value
    assert len(apps(made.base, messages.STATS)) == 1


@pytest.mark.parametrize("stats", [{}, {"stats": {}}])
def test_statistics_are_there_once(stats: Json) -> None:
    """The app with the counters is there once, configured or not."""
    made = of(**stats)
    assert len(apps(made.base, messages.STATS)) == 1
    assert set(policy(made).level) == {0}


def test_other_apps_are_untouched() -> None:
    """DNS, observatories, FakeDNS and other apps stay byte for byte, and in order."""
    text = json.dumps(
        {
            "dns": {"servers": ["1.1.1.1"]},
            "fakedns": {"ipPool": "198.18.0.0/15", "poolSize": 100},
            "observatory": {"subjectSelector": ["x"]},
            "routing": {"domainStrategy": "IPIfNonMatch"},
        }
    )
    ours = {messages.COMMANDER, messages.METRICS, messages.LOG, messages.POLICY, messages.STATS, messages.ROUTER}
    before = [app for app in Config.FromString(convert(text)).app if app.type not in ours]
    assert len(before) > 3
    assert [app for app in taken_over(text).base.app if app.type not in ours] == before


def test_fields_of_other_versions_stay() -> None:
    """Unknown fields of a message survive."""
    text = json.dumps({"inbounds": [vless(stream=STREAMS["tls"])], "log": {"error": FILE}})
    unknown = b"\xfa\x7f\x04kept"
    message = Config.FromString(convert(text))
    for app in message.app:
        app.value += unknown
    receiver = xray_pb2.ReceiverConfig.FromString(message.inbound[0].receiver_settings.value)
    receiver.stream_settings.security_settings[0].value += unknown
    message.inbound[0].receiver_settings.value = receiver.SerializeToString() + unknown
    message.inbound[0].proxy_settings.value += unknown
    given = message.SerializeToString() + unknown
    made = plan(given, text, frozenset())
    assert given.count(unknown) == len(message.app) + 4
    assert render(made, THROUGH_INBOUND, {"in": {}}).count(unknown) == given.count(unknown)


# Inbounds


def test_supplied_users_are_the_only_ones() -> None:
    """Clients of managed inbounds in the configuration are dropped, in any case of keys."""
    text = json.dumps({"inbounds": [vless()]})
    for spelled in ('"clients"', '"Clients"', '"CLIENTS"'):
        made = taken_over(text.replace('"clients"', spelled).replace('"inbounds"', '"InBounds"'))
        assert made.tags == ("in",)
        assert clients(made.base.inbound[0]) == 0
        assert b"theirs" not in render(made, THROUGH_INBOUND, {"in": {}})


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        ("vless", {"decryption": "none", "clients": [{"id": ID}]}),
        ("vmess", {"clients": [{"id": ID}]}),
        ("trojan", {"clients": [{"password": "theirs"}]}),
        ("shadowsocks", {"clients": [{"password": "theirs", "method": "aes-128-gcm"}]}),
        (
            "shadowsocks",
            {"method": "2022-blake3-aes-128-gcm", "password": KEY, "clients": [{"password": KEY, "email": "x"}]},
        ),
        ("hysteria", {"version": 2, "clients": [{"auth": "theirs"}]}),
    ],
)
def test_every_managed_protocol(protocol: str, settings: Json) -> None:
    """Managed inbounds lose their clients; excluded and untagged ones stay byte for byte."""
    text = json.dumps({"inbounds": [inbound(protocol, "in", **settings)]})
    made = taken_over(text)
    before = Config.FromString(convert(text)).inbound[0]
    assert made.tags == ("in",)
    field = xray_pb2.Shadowsocks2022MultiUserConfig if "method" in settings else xray_pb2.UsersConfig
    assert len(field.FromString(before.proxy_settings.value).users) == 1
    assert len(field.FromString(made.base.inbound[0].proxy_settings.value).users) == 0
    excluded = taken_over(text, "in")
    assert (excluded.tags, list(excluded.base.inbound), excluded.warnings) == ((), [before], ())
    untagged = json.dumps({"inbounds": [inbound(protocol, None, **settings)]})
    left = taken_over(untagged)
    assert (left.tags, list(left.base.inbound)) == ((), list(Config.FromString(convert(untagged)).inbound))
    assert "without a tag" in left.warnings[0]


@pytest.mark.parametrize(
    "other",
    [
        inbound("socks", auth="password", accounts=[{"user": "a", "pass": "b"}]),
        inbound("http", accounts=[{"user": "a", "pass": "b"}]),
        inbound("dokodemo-door", address="127.0.0.1", port=80, network="tcp"),
        inbound("mixed", auth="noauth"),
    ],
    ids=lambda made: str(made["protocol"]),
)
def test_other_inbounds_are_left(other: Json) -> None:
    """An inbound that the node cannot manage stays as it is, with its accounts, and gets no users."""
    text = json.dumps({"inbounds": [other]})
    made = taken_over(text)
    assert (made.tags, made.warnings) == ((), ())
    assert list(made.base.inbound) == list(Config.FromString(convert(text)).inbound)


def test_an_untagged_inbound_is_left() -> None:
    """A Shadowsocks-2022 inbound without a tag keeps its shared key."""
    text = json.dumps({"inbounds": [inbound("shadowsocks", None, method="2022-blake3-aes-128-gcm", password=KEY)]})
    made = taken_over(text)
    assert list(made.base.inbound) == list(Config.FromString(convert(text)).inbound)
    assert made.tags == ()


@pytest.mark.parametrize("more", [{"clients": []}, {}])
@pytest.mark.parametrize("method", ["2022-blake3-aes-128-gcm", "2022-blake3-aes-256-gcm"])
def test_shadowsocks_2022_becomes_multi_user(method: str, more: Json) -> None:
    """Without clients the core would admit all who know the server's key: it becomes a multi-user inbound."""
    key = KEY if "128" in method else "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
    settings = {"method": method, "password": key, "network": "tcp,udp", **more}
    (handler,) = (made := of(inbounds=[inbound("shadowsocks", **settings)])).base.inbound
    assert handler.proxy_settings.type == messages.SHADOWSOCKS_2022
    multi = xray_pb2.Shadowsocks2022MultiUserConfig.FromString(handler.proxy_settings.value)
    assert (multi.method, multi.key, len(multi.network), len(multi.users)) == (method, key, 2, 0)
    assert made.inbounds["in"].method == method


def test_shadowsocks_with_one_key_for_all() -> None:
    """A Shadowsocks-2022 method without users is left as configured, with a warning."""
    key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
    made = of(inbounds=[inbound("shadowsocks", method="2022-blake3-chacha20-poly1305", password=key)])
    assert made.tags == ()
    assert "'in'" in made.warnings[0]


@pytest.mark.parametrize("method", ["aes-128-gcm", "aes-256-gcm", "chacha20-poly1305", "xchacha20-poly1305"])
def test_shadowsocks_without_clients(method: str) -> None:
    """The nameless user that the core makes of the inbound's own password is dropped; its method is the default."""
    text = json.dumps({"inbounds": [inbound("shadowsocks", method=method, password="theirs")]})
    assert b"theirs" in convert(text)
    for read in (text, "not to be read"):
        made = plan(convert(text), read, frozenset())
        assert b"theirs" not in render(made, THROUGH_INBOUND, {"in": {}})
        ids = {"chacha20-poly1305": ("", "chacha20-poly1305")}
        assert made.inbounds["in"].method in ids.get(method, (method,))


HYSTERIA = {
    "network": "hysteria",
    "security": "tls",
    "tlsSettings": {"alpn": ["h3"]},
    "hysteriaSettings": {"version": 2, "auth": "shared-password"},
}


def test_hysterias_shared_password() -> None:
    """A Hysteria inbound's shared password, which admits clients without users, is removed; an outbound's stays."""
    out = {
        "protocol": "hysteria",
        "settings": {"version": 2, "address": "x.example", "port": 1},
        "streamSettings": HYSTERIA,
    }
    text = json.dumps({"inbounds": [inbound("hysteria", stream=HYSTERIA, version=2)], "outbounds": [out]})
    made = taken_over(text)
    assert b"shared-password" not in made.base.inbound[0].SerializeToString()
    assert b"shared-password" in made.base.outbound[0].SerializeToString()
    excluded = taken_over(text, "in")
    assert b"shared-password" in excluded.base.inbound[0].SerializeToString()


def test_a_transport_password_of_another_protocol_stays() -> None:
    """Another protocol over Hysteria's transport has its own users, and keeps the password as a second check."""
    made = of(inbounds=[vless(stream=HYSTERIA)])
    assert made.tags == ("in",)
    assert b"shared-password" in made.base.inbound[0].SerializeToString()


@pytest.mark.parametrize("protocol", ["dokodemo-door", "tunnel"])
def test_a_missing_port(protocol: str) -> None:
    """A dokodemo-door on a unix socket without a port is refused by name; with one it passes."""
    door = inbound(protocol, "door", network="unix", followRedirect=True) | {"listen": "@door"}
    with pytest.raises(InvalidConfig, match="door"):
        of(inbounds=[door])
    assert of(inbounds=[door | {"settings": {**door["settings"], "port": 1}}]).tags == ()


def test_wireguard_is_left_and_warned_of() -> None:
    """This core cannot change WireGuard peers: they stay as configured, with a warning."""
    key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
    peers = [{"publicKey": key, "allowedIPs": ["10.0.0.2/32"]}]
    text = json.dumps({"inbounds": [inbound("wireguard", "wg", secretKey=key, peers=peers)]})
    made = taken_over(text)
    assert made.tags == ()
    assert "'wg'" in made.warnings[0]
    assert list(made.base.inbound) == list(Config.FromString(convert(text)).inbound)


# Vision


REALITY_STREAM = {"network": "raw", "security": "reality", "realitySettings": REALITY_SERVER}
WS_TLS = {"network": "ws", "security": "tls", "tlsSettings": {"serverName": "x"}}
HEADER = {"type": "http", "request": {}, "response": {}}


@pytest.mark.parametrize(
    ("stream", "fits"),
    [
        (STREAMS["tls"], True),
        (REALITY_STREAM, True),
        ({"security": "tls", "tlsSettings": {}}, True),
        (None, False),
        ({"network": "raw"}, False),
        (WS_TLS, False),
        ({"network": "grpc", "security": "tls", "tlsSettings": {}}, False),
        (STREAMS["tls"] | {"rawSettings": {"header": HEADER}}, False),
        (STREAMS["tls"] | {"rawSettings": {"header": {"type": "none"}}}, True),
    ],
)
def test_where_vision_fits(stream: Json | None, fits: bool) -> None:
    """Vision needs raw TCP under TLS or REALITY; elsewhere users connect without it, default flow or not."""
    made = of(inbounds=[vless(stream=stream, flow="xtls-rprx-vision")])
    found = made.inbounds["in"]
    assert (found.vision, found.flow) == (fits, "xtls-rprx-vision" if fits else "")


def test_hints_are_each_inbounds_own() -> None:
    """A default flow applies to the inbound that has it, whatever comes before it."""
    tls = STREAMS["tls"]
    first, second, third = (vless(tag, tls) | {"port": 1000 + n} for n, tag in enumerate("abc"))
    second["settings"] = second["settings"] | {"flow": "xtls-rprx-vision"}
    text = json.dumps({"inbounds": [first, second, third]}).replace('"flow"', '/* " */ "Flow"')
    made = taken_over(text)
    assert [made.inbounds[tag].flow for tag in "abc"] == ["", "xtls-rprx-vision", ""]


# Users in, and the whole accepted by the core


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=5), st.sampled_from(["vless", "shadowsocks_2022"]))
def test_users_are_appended(accounts: list[bytes], protocol: str) -> None:
    """Users appended to an inbound's settings decode as its users, of any length."""
    packed = [xray_pb2.User(email="x", account=TypedMessage(value=value)).SerializeToString() for value in accounts]
    kind = xray_pb2.Shadowsocks2022MultiUserConfig if protocol == "shadowsocks_2022" else xray_pb2.UsersConfig
    users = kind.FromString(users_field(protocol, packed)).users
    assert [one.account.value for one in users] == accounts


@pytest.fixture(scope="module")
def all_places(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Kind]:
    return kinds(certs.make(tmp_path_factory.mktemp("inbounds"), [SERVER_NAME]), 443)


def with_everybody(places: Mapping[str, Kind]) -> tuple[Plan, Roster]:
    """All kinds of inbounds in one configuration, with three users each."""
    inbounds = [kind.inbound(10_000 + number, name) for number, (name, kind) in enumerate(places.items())]
    made = of(inbounds=inbounds, outbounds=[{"protocol": "freedom", "tag": "direct"}])
    people = [user(TestUser.new(f"user{number}"), places) for number in range(3)]
    for number, person in enumerate(people):
        person.proxies.vless.flow = "xtls-rprx-vision"
        person.proxies.shadowsocks.method = ("aes-256-gcm", "", "chacha20-ietf-poly1305")[number]
    roster, refused = Roster.of(people, made.tags, made.account)
    assert refused == []
    return made, roster


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_is_managed(all_places: Mapping[str, Kind], name: str) -> None:
    """Each kind of inbound in the tests takes supplied users, at a start and in a swap."""
    made, roster = with_everybody({name: all_places[name]})
    (handler, _) = rendered(made, accounts=roster.target).inbound
    assert handler == made.handler(name, roster.target[name])
    for person in range(3):
        assert f"user{person}".encode() in handler.proxy_settings.value


def test_the_core_takes_it_with_users_of_every_protocol(all_places: Mapping[str, Kind]) -> None:
    """The real core builds the result: every kind of inbound, users in all, the node's API and its rule."""
    made, roster = with_everybody(all_places)
    assert set(made.tags) == set(NAMES)
    assert all(len(accounts) == 3 for accounts in roster.target.values())
    assert accepts(render(made, THROUGH_INBOUND, roster.target)) == ""


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"inbounds": [], "outbounds": []} // nothing',
        '{"api": {"tag": "api", "services": ["StatsService"]}, "routing": {"rules": '
        '[{"inboundTag": ["api"], "outboundTag": "api"}]}, "metrics": {"tag": "m"}}',
        '{"outbounds": [{"protocol": "freedom"}], "routing": {"balancers": [{"tag": "b", "selector": [""]}], '
        '"rules": [{"balancerTag": "b", "network": "tcp"}]}}',
        '{"policy": {"levels": {"3": {"bufferSize": 4}}}, "LOG": {"loglevel": "none"}}',
    ],
)
def test_the_core_takes_odd_configurations(text: str) -> None:
    """The core still builds odd configurations after the node's changes."""
    made = taken_over(text)
    assert accepts(render(made, THROUGH_INBOUND, {tag: {} for tag in made.tags})) == ""


def test_on_which_sockets_it_listens() -> None:
    """By port: addresses and socket options; all unspecified addresses are one."""

    def listening(**more: object) -> Mapping[int, frozenset[bytes]]:
        made = {**vless(), "port": "5-6", **more}
        return of(inbounds=[{key: value for key, value in made.items() if value}]).listens

    everywhere = listening(listen=None)
    assert everywhere.keys() == {5, 6}
    assert listening(listen="0.0.0.0") == listening(listen="::") == everywhere
    assert listening(listen="127.0.0.1")[5] != everywhere[5]
    assert listening(listen=None, streamSettings={"sockopt": {"v6only": True}})[5] != everywhere[5]
    assert listening(listen=None, streamSettings={"security": "none"}) == everywhere
    assert listening(listen="@in") == {}


def test_what_one_process_has() -> None:
    """The keys of WireGuard inbounds and outbounds, since peers know only one process at a time."""
    peers = [{"publicKey": "A" * 43 + "=", "endpoint": "127.0.0.1:1"}]
    wireguard = {"tag": "warp", "protocol": "wireguard", "settings": {"secretKey": "A" * 43 + "=", "peers": peers}}
    assert of(outbounds=[{"protocol": "freedom"}]).exclusive == []
    told = ["only one process can use the WireGuard key of 'warp': its peers answer the process that sent last"]
    assert of(outbounds=[wireguard]).exclusive == told
    listening = {**wireguard, "listen": "127.0.0.1", "port": 5}
    assert of(inbounds=[listening]).exclusive == told


def test_reverse_proxies() -> None:
    """The bridges of both kinds of portal do not move to another process while the first one lives."""
    told = ["bridges of the reverse proxy 'home' stay connected to the old process"]
    assert of(reverse={"portals": [{"tag": "home", "domain": "home.test"}]}).exclusive == told
    assert of(reverse={"bridges": [{"tag": "home", "domain": "home.test"}]}).exclusive == []
    user = {"id": "11111111-1111-1111-1111-111111111111", "reverse": {"tag": "home"}}
    text = json.dumps({"inbounds": [inbound("vless", decryption="none", clients=[user])]})
    assert taken_over(text, "in").exclusive == told
    assert taken_over(text).exclusive == []


def test_datagrams_that_stand_for_themselves() -> None:
    """Those of Shadowsocks, unless its transport is over UDP, and those that are forwarded."""
    shadowsocks = {**inbound("shadowsocks", method="aes-128-gcm", password="x"), "port": 5}
    assert of(inbounds=[shadowsocks]).datagrams == {5}
    assert of(inbounds=[{**shadowsocks, "streamSettings": {"network": "kcp"}}]).datagrams == frozenset()
    passing = {**inbound("dokodemo-door", address="127.0.0.1", network="udp"), "port": 6}
    assert of(inbounds=[passing]).datagrams == {6}
    transparent = {"sockopt": {"tproxy": "tproxy"}}
    assert of(inbounds=[{**passing, "streamSettings": transparent}]).datagrams == frozenset()


@pytest.mark.parametrize(
    ("stream", "udp"),
    [
        ({"network": "raw"}, False),
        ({"network": "ws"}, False),
        ({"network": "kcp"}, True),
        ({"network": "hysteria", "hysteriaSettings": {"version": 2}}, True),
        ({"network": "xhttp"}, False),
        ({"network": "xhttp", "security": "tls", "tlsSettings": {"alpn": ["h2", "h3"]}}, False),
        ({"network": "xhttp", "security": "tls", "tlsSettings": {"alpn": ["h3"]}}, True),
    ],
)
def test_sessions(stream: Json, udp: bool) -> None:
    """Ports have sessions where the transport is over UDP; they have no TCP connections."""
    made = of(inbounds=[{**vless(stream=stream), "port": "5-6"}])
    assert bool(made.exclusive) is (udp and stream["network"] == "xhttp")
    assert (set(made.sessions), set(made.ingress)) == (({5, 6}, set()) if udp else (set(), {"in"}))
