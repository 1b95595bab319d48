"""What the node makes of a sing-box configuration, and entries of users. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.process.known import Allowed
from drivers.sing_box.accounts import BUILDERS, Inbound, name_of, nobody, unlabelled
from drivers.sing_box.config import Endpoint, Plan, plan, render, roll
from node.contract.accounts import Unusable
from node.errors import InvalidConfig
from protos.service_pb2 import User

HOME = Path("/state/run")


def planned(
    *inbounds: dict[str, Any], exclude: frozenset[str] = frozenset(), counts: bool = True, allow: str = "", **more: Any
) -> Plan:
    allowed = Allowed(frozenset(allow.split(",")))
    return plan(json.dumps({"inbounds": inbounds, **more}).encode(), exclude, HOME, counts, allowed)


def rendered(made: Plan, target: Mapping[str, dict[str, bytes]] | None = None, ports: tuple[int, ...] = (1, 2)) -> Any:
    live = bool(made.live)
    api = Endpoint.new(lambda count: (*ports, 3)[:count], len(ports) > 1, live)
    return json.loads(render(made, api, target or {tag: {} for tag in made.tags}))


def person(email: str = "a@x", **more: str) -> User:
    user = User(email=email)
    user.proxies.vless.id = user.proxies.vmess.id = more.get("id", "11111111-1111-4111-8111-111111111111")
    user.proxies.vless.flow = more.get("flow", "")
    password = more.get("password", "secret")
    user.proxies.trojan.password = user.proxies.hysteria.auth = user.proxies.shadowsocks.password = password
    user.proxies.shadowsocks.method = more.get("method", "")
    return user


def test_users_are_put_in() -> None:
    """The supplied ones, in the place of the configuration's own, and their names where they are counted."""
    made = planned({"type": "vless", "tag": "a", "users": [{"name": "own"}]}, {"type": "trojan", "tag": "b"})
    account = made.account("a", person('o"d d,@x'))
    assert account
    whole = rendered(made, {"a": {"key": account.packed}, "b": {}})
    assert [user["name"] for user in whole["inbounds"][0]["users"]] == ['o"d d,@x']
    assert [user["name"].startswith("nobody-") for user in whole["inbounds"][1]["users"]] == [True]
    assert whole["experimental"]["v2ray_api"]["stats"]["users"] == ['o"d d,@x']


def test_excluded_and_other_inbounds_are_left_alone() -> None:
    """With their own users, who are counted."""
    own = [{"username": "u", "password": "p"}]
    made = planned(
        {"type": "mixed", "tag": "a", "users": own},
        {"type": "shadowsocks", "tag": "b", "method": "none"},
        {"type": "shadowtls", "tag": "c", "version": 2},
        {"type": "tun"},
        exclude=frozenset("a"),
        allow="tun",
    )
    assert made.tags == []
    whole = rendered(made)
    assert whole["inbounds"][0]["users"] == own
    assert not any("users" in inbound for inbound in whole["inbounds"][1:])
    assert whole["inbounds"][3]["tag"] == "3"
    assert whole["experimental"]["v2ray_api"]["stats"]["users"] == ["u"]


def test_double_tags_are_refused() -> None:
    """Also where one is another's number."""
    with pytest.raises(InvalidConfig, match="'1'"):
        planned({"type": "vless", "tag": "1"}, {"type": "vless"})


def test_two_inbounds_on_one_port_are_refused() -> None:
    """Both could have it, since each lets a next core have it: users would come in by chance."""
    with pytest.raises(InvalidConfig, match="port 5"):
        planned({"type": "vless", "tag": "a", "listen_port": 5}, {"type": "vmess", "tag": "b", "listen_port": 5})
    planned({"type": "vless", "tag": "a", "listen_port": 5}, {"type": "tuic", "tag": "b", "listen_port": 5})
    other = {"type": "vless", "tag": "b", "listen": "127.0.0.2", "listen_port": 5}
    planned({"type": "vless", "tag": "a", "listen": "127.0.0.1", "listen_port": 5}, other)


def test_the_apis_are_behind_the_first_rule() -> None:
    """Ports, a secret, and the rule before all others; without v2ray_api one port."""
    made = planned({"type": "vless", "tag": "a"}, route={"rules": [{"action": "sniff"}], "final": "x"})
    whole = rendered(made)
    assert whole["route"]["rules"][0] == {"port": [1, 2], "network": ["tcp"], "action": "reject"}
    assert whole["route"]["rules"][1:] == [{"action": "sniff"}] and whole["route"]["final"] == "x"
    (service,) = whole["services"]
    assert service["listen"] == "127.0.0.1" and len(service["secret"]) > 32
    alone = rendered(made, ports=(1,))
    assert "experimental" not in alone and alone["route"]["rules"][0]["port"] == [1]


def test_what_is_left_out() -> None:
    """Files, programs and APIs of the configuration; the rest stays, unknown things too."""
    made = planned(
        {"type": "vless", "tag": "a", "tls": {"acme": {"domain": "x"}}, "later": 1},
        log={"output": "/etc/passwd", "level": "debug"},
        ntp={"write_to_system": True, "server": "x"},
        outbounds=[{"type": "tor", "executable_path": "/bin/sh", "data_directory": "/etc"}],
        endpoints=[{"type": "tailscale", "state_directory": "/etc"}],
        services=[{"type": "api"}, {"type": "ssm-api"}, {"type": "derp", "config_path": "/etc/x"}, {"type": "other"}],
        experimental={"clash_api": {"external_ui": "/x"}, "cache_file": {}, "v2ray_api": {"listen": "x"}, "later": 2},
        certificate_providers=[{"type": "acme", "tag": "c"}],
        unknown={"kept": True},
        allow="tor,tailscale,derp,other,later,unknown",
    )
    whole = rendered(made)
    kept = str(HOME / "kept")
    assert whole["log"] == {"level": "debug", "timestamp": True}
    assert whole["ntp"] == {"server": "x"}
    [tor], [tailscale] = whole["outbounds"], whole["endpoints"]
    assert tor == {"type": "tor", "data_directory": tor["data_directory"], "tag": "0"}
    assert Path(tor["data_directory"]).parent == Path(tailscale["state_directory"]).parent == Path(kept)
    assert [service["type"] for service in whole["services"]] == ["derp", "other", "api"]
    assert whole["services"][0]["config_path"].startswith(str(HOME))
    assert whole["experimental"].keys() == {"later", "v2ray_api"}
    assert whole["certificate_providers"][0]["data_directory"] == whole["inbounds"][0]["tls"]["acme"]["data_directory"]
    assert whole["unknown"] == {"kept": True} and whole["inbounds"][0]["later"] == 1
    words = ("log.output", "write_to_system", "executable_path", "clash_api", "cache_file", "service api", "ssm-api")
    for word in words:
        assert any(word in warning for warning in made.warnings), word


def test_each_keeps_its_own() -> None:
    """What outlives a core is in one directory for each that keeps something, the same for its tag every time."""

    def directories(*tags: str) -> list[str]:
        made = planned(
            endpoints=[{"type": "tailscale", "tag": tag, "state_directory": "/etc"} for tag in tags],
            outbounds=[{"type": "tor", "tag": tag, "data_directory": "/etc"} for tag in tags],
            allow="tailscale,tor",
        )
        whole = rendered(made)
        states = [endpoint["state_directory"] for endpoint in whole["endpoints"]]
        return states + [outbound["data_directory"] for outbound in whole["outbounds"]]

    tags = ("a", "b", "../" * 300)
    found = directories(*tags)
    assert len(set(found)) == 6 and all(Path(path).parent == HOME / "kept" for path in found)
    assert set(directories(*reversed(tags))) == set(found)
    assert max(len(Path(path).name) for path in found) < 256


def test_a_machine_of_tailscales_keeps_its_own_unasked() -> None:
    """The core has one directory for all that name none: they would be one machine."""
    endpoints = [{"type": "tailscale", "tag": tag} for tag in ("a", "A")] + [{"type": "wireguard", "tag": "w"}]

    def kept(endpoints: list[dict[str, Any]]) -> list[str | None]:
        whole = rendered(planned(endpoints=endpoints, allow="tailscale"))
        return [endpoint.get("state_directory") for endpoint in whole["endpoints"]]

    found = kept(endpoints)
    assert len(set(found)) == 3 and found[2] is None
    named = [{**endpoint, "state_directory": "/etc"} for endpoint in endpoints[:2]]
    assert kept(named) == found[:2]


def test_a_build_that_does_not_count_exactly_says_so() -> None:
    """As a warning."""
    assert "with_v2ray_api" in "".join(planned(counts=False).warnings)
    assert not planned().warnings


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        (Inbound("t", "vless"), {"flow": "unknown"}, "flow"),
        (Inbound("t", "vless"), {"id": "x" * 31}, "UUID"),
        (Inbound("t", "shadowsocks", method="aes-256-gcm"), {"method": "aes-128-gcm"}, "one for an inbound"),
        (Inbound("t", "tuic"), {"password": ""}, "id and a password"),
        (Inbound("t", "tuic"), {"id": ""}, "id and a password"),
        (Inbound("t", "http"), {"email": "a:b"}, "colon"),
        (Inbound("t", "socks"), {"password": "x" * 256}, "255"),
    ],
)
def test_what_cannot_be_expressed(kind: Inbound, more: dict[str, str], why: str) -> None:
    """It is an error that says why."""
    with pytest.raises(Unusable, match=why):
        BUILDERS[kind.type](kind, person(**more))


@pytest.mark.parametrize("kind", sorted(BUILDERS))
def test_an_empty_credential_is_none(kind: str) -> None:
    """Some types would let everybody in by it."""
    method = "2022-blake3-aes-128-gcm" if kind == "shadowsocks" else ""
    assert BUILDERS[kind](Inbound("t", kind, method=method), person(id="", password="")) is None
    assert name_of(nobody(Inbound("t", kind, method=method))).startswith("nobody-")


def test_a_flow_where_it_fits() -> None:
    """Vision needs TLS and nothing between: with it elsewhere a user could not connect at all."""
    made = planned(
        {"type": "vless", "tag": "tls", "tls": {"enabled": True}},
        {"type": "vless", "tag": "ws", "tls": {"enabled": True}, "transport": {"type": "ws"}},
        {"type": "vless", "tag": "raw"},
    )
    accounts = [made.account(tag, person(flow="xtls-rprx-vision")) for tag in made.tags]
    assert [json.loads(account.packed)["flow"] for account in accounts if account] == ["xtls-rprx-vision", "", ""]


@given(st.text(min_size=1))
def test_any_name_is_found_again(name: str) -> None:
    """In the bytes of an entry, whatever characters it has."""
    for kind in ("trojan", "vmess"):
        account = BUILDERS[kind](Inbound("t", kind), person(name))
        assert account and name_of(account.packed) == name


def test_live_users_are_in_a_file_of_their_own() -> None:
    """Not in the configuration; by names in which no slash is, and with counters."""
    made = planned(
        {"type": "shadowsocks", "tag": "s", "method": "aes-256-gcm", "users": [{"name": "own"}]},
        {"type": "vless", "tag": "v"},
        {"type": "shadowsocks", "tag": "none", "method": "none", "managed": True},
    )
    assert made.live == ["s"]
    account = made.account("s", person("a/b"))
    assert account
    target = {"s": {"a/b": account.packed}, "v": {}}
    api = Endpoint.new(lambda count: range(1, count + 1), True, True)
    whole = json.loads(render(made, api, target, "/file"))
    assert whole["inbounds"][0]["managed"] is True and "users" not in whole["inbounds"][0]
    service = whole["services"][-1]
    assert (service["servers"], service["cache_path"]) == ({api.path(0): "s"}, "/file")
    assert whole["route"]["rules"][0]["port"] == [1, 2, 3]
    file = json.loads(roll(made, api, target))["endpoints"][api.path(0)]
    (name,) = file["users"]
    assert "/" not in name and unlabelled(name) == "a/b"
    assert file["users"][name] == "secret" and file["user_tcp_sessions"] == {name: 0}
    assert whole["experimental"]["v2ray_api"]["stats"]["users"] == [name]
    assert "cache_path" not in json.loads(render(made, api, target))["services"][-1]


def test_thousands_of_inbounds() -> None:
    """Reading and writing a configuration takes as long for each of them as for one."""
    began = time.process_time()
    made = planned(*({"type": "trojan", "tag": f"inbound {number}"} for number in range(6000)))
    account = made.account("inbound 5", person("anna"))
    assert account
    whole = rendered(made, {tag: {} for tag in made.tags} | {"inbound 5": {"anna": account.packed}})
    assert [len(inbound["users"]) for inbound in whole["inbounds"]] == [1] * 6000
    assert whole["inbounds"][5]["users"] == [json.loads(account.packed)]
    assert time.process_time() - began < 2


def test_on_which_sockets_it_listens() -> None:
    """By port, in whatever order; what is not of the socket does not count."""
    here, there = ({"type": "vless", "tag": host, "listen": host, "listen_port": 5} for host in ("127.0.0.1", "::1"))
    assert planned(here, there).listens == planned({**there, "type": "trojan"}, here).listens
    assert planned(here).listens.keys() == planned(there).listens.keys() == {5}
    assert planned(here).listens == planned(here, {**here, "type": "tuic", "tag": "beside it"}).listens
    assert planned(here).listens != planned(there).listens
    assert planned(here).listens != planned({**here, "bind_interface": "lo"}).listens
    assert planned({"type": "vless", "tag": "a"}).listens == {}


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ({"endpoints": [{"type": "wireguard", "tag": "warp"}]}, "WireGuard key of 'warp'"),
        ({"endpoints": [{"type": "tailscale", "tag": "net"}]}, "tailscale endpoint 'net'"),
        ({"inbounds": [{"type": "tun", "tag": "tun"}]}, "'tun'"),
        ({"services": [{"type": "resolved"}]}, "resolved"),
        ({"certificate_providers": [{"type": "acme", "tag": "c"}]}, "ACME"),
        ({"inbounds": [{"type": "trojan", "tls": {"acme": {"domain": "x"}}}]}, "ACME"),
        ({"outbounds": [{"type": "tor", "data_directory": "/x"}]}, "disk"),
    ],
)
def test_what_one_process_has(what: Any, word: str) -> None:
    """Each is told by its name."""
    [line] = planned(*what.pop("inbounds", []), allow="tailscale,tun,resolved,tor", **what).exclusive
    assert word in line


def test_what_every_process_can_have() -> None:
    """What is left out is nothing that another process could want: a cache file, and APIs."""
    left_out = {"cache_file": {"enabled": True, "path": "/x"}, "clash_api": {"external_controller": "127.0.0.1:1"}}
    made = planned({"type": "vless", "tag": "a"}, experimental=left_out, services=[{"type": "api"}])
    assert made.exclusive == []
    assert "cache_file" in "".join(made.warnings)


def test_others_may_have_the_ports_beside_it() -> None:
    """All that listen on a port, managed or not."""
    inbounds = [
        {"type": kind, "tag": kind, "listen_port": 5 + at}
        for at, kind in enumerate(("vless", "mixed", "direct", "tuic"))
    ]
    assert all(inbound["reuse_addr"] for inbound in planned(*inbounds, exclude=frozenset({"vless"})).tree["inbounds"])


QUIC = {"transport": {"type": "quic"}}


def test_what_comes_by_udp() -> None:
    """Where clients have sessions, and where each datagram stands for itself."""
    kinds: list[dict[str, Any]] = [{"type": kind} for kind in ("hysteria", "hysteria2", "tuic", "naive", "vless")]
    kinds += [{"type": "vmess", **QUIC}, {"type": "trojan", "transport": {"type": "ws"}}, {"type": "shadowsocks"}]
    kinds += [{"type": "direct"}, {"type": "tproxy"}]
    made = planned(
        *({**kind, "tag": str(at), "listen_port": at} for at, kind in enumerate(kinds, 1)),
        {"type": "tun", "tag": "t"},
        allow="tun",
    )
    assert (set(made.sessions), set(made.datagrams)) == ({1, 2, 3, 4, 6}, {8, 9})


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ({"type": "vless"}, {"type": "trojan"}, True),
        ({"type": "vless"}, {"type": "hysteria2"}, False),
        ({"type": "tuic"}, {"type": "hysteria2"}, True),
        ({"type": "vless"}, {"type": "trojan", **QUIC}, False),
        ({"type": "tuic"}, {"type": "trojan", **QUIC}, True),
        ({"type": "tuic"}, {"type": "shadowsocks"}, True),
        ({"type": "tuic"}, {"type": "shadowsocks", "network": "tcp"}, False),
        ({"type": "direct", "network": "udp"}, {"type": "shadowsocks", "network": "tcp"}, False),
        ({"type": "tuic"}, {"type": "naive", "network": ["tcp", "udp"]}, True),
        ({"type": "tuic"}, {"type": "hysteria2", "listen": "127.0.0.1"}, False),
    ],
)
def test_a_port_that_two_have(one: dict[str, Any], other: dict[str, Any], clash: bool) -> None:
    """By the same network, at the same address: they would take turns in having whoever comes."""
    inbounds = [{"listen_port": 5, "tag": tag, **inbound} for tag, inbound in (("a", one), ("b", other))]
    if not clash:
        planned(*inbounds)
        return
    with pytest.raises(InvalidConfig, match="'a' and 'b' have the same port 5"):
        planned(*inbounds)
