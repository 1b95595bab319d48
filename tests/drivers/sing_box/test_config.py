"""The node's sing-box configuration, and users' entries in it. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.process.aliases import Aliases
from drivers.process.allowlist import Allowed
from drivers.sing_box.accounts import (
    BUILDERS,
    Inbound,
    alike,
    label,
    logs_in_otherwise,
    name_of,
    random_entry,
    unlabelled,
    unslashed,
)
from drivers.sing_box.config import ApiAddress, Plan, plan, render, roll
from node.base.errors import InvalidConfig
from node.contract.accounts import Unusable
from node.contract.counters import SEPARATOR
from protos.service_pb2 import User

HOME = Path("/state/run")


def planned(
    *inbounds: dict[str, Any], exclude: frozenset[str] = frozenset(), counts: bool = True, allow: str = "", **more: Any
) -> Plan:
    allowed = Allowed(frozenset(allow.split(",")))
    return plan(json.dumps({"inbounds": inbounds, **more}).encode(), exclude, HOME, counts, allowed)


def rendered(made: Plan, target: Mapping[str, dict[str, bytes]] | None = None, ports: tuple[int, ...] = (1, 2)) -> Any:
    live = bool(made.live)
    api = ApiAddress.new(lambda count: (*ports, 3)[:count], len(ports) > 1, live)
    return json.loads(render(made, api, target or {tag: {} for tag in made.tags}))


def person(email: str = "a@x", **more: str) -> User:
    user = User(email=email)
    user.proxies.vless.id = user.proxies.vmess.id = more.get("id", "11111111-1111-4111-8111-111111111111")
    user.proxies.vless.flow = more.get("flow", "")
    password = more.get("password", "secret")
    user.proxies.trojan.password = user.proxies.hysteria.auth = user.proxies.shadowsocks.password = password
    user.proxies.shadowsocks.method = more.get("method", "")
    return user


def test_users_are_added() -> None:
    """The supplied users replace those of the configuration, and v2ray_api counts their names."""
    made = planned({"type": "vless", "tag": "a", "users": [{"name": "own"}]}, {"type": "trojan", "tag": "b"})
    account = made.account("a", person('o"d d,@x'))
    assert account
    whole = rendered(made, {"a": {"key": account.packed}, "b": {}})
    assert [user["name"] for user in whole["inbounds"][0]["users"]] == ['o"d d,@x']
    assert [user["name"].startswith("nobody-") for user in whole["inbounds"][1]["users"]] == [True]
    assert whole["experimental"]["v2ray_api"]["stats"]["users"] == ['o"d d,@x']


def test_excluded_and_other_inbounds_are_left_alone() -> None:
    """They keep their own users, who are counted."""
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
    """Also if one inbound's tag is another one's index."""
    with pytest.raises(InvalidConfig, match="'1'"):
        planned({"type": "vless", "tag": "1"}, {"type": "vless"})


def test_two_inbounds_on_one_port_are_refused() -> None:
    """Both could bind it, since listeners can be shared: the kernel would give connections to either."""
    with pytest.raises(InvalidConfig, match="port 5"):
        planned({"type": "vless", "tag": "a", "listen_port": 5}, {"type": "vmess", "tag": "b", "listen_port": 5})
    planned({"type": "vless", "tag": "a", "listen_port": 5}, {"type": "tuic", "tag": "b", "listen_port": 5})
    other = {"type": "vless", "tag": "b", "listen": "127.0.0.2", "listen_port": 5}
    planned({"type": "vless", "tag": "a", "listen": "127.0.0.1", "listen_port": 5}, other)


def test_the_apis_are_behind_the_first_rule() -> None:
    """They have ports and a secret, and the rule precedes all others; without v2ray_api there is one port."""
    made = planned({"type": "vless", "tag": "a"}, route={"rules": [{"action": "sniff"}], "final": "x"})
    whole = rendered(made)
    assert whole["route"]["rules"][0] == {"port": [1, 2], "network": ["tcp"], "action": "reject"}
    assert whole["route"]["rules"][1:] == [{"action": "sniff"}] and whole["route"]["final"] == "x"
    (service,) = whole["services"]
    assert service["listen"] == "127.0.0.1" and len(service["secret"]) > 32
    alone = rendered(made, ports=(1,))
    assert "experimental" not in alone and alone["route"]["rules"][0]["port"] == [1]


def test_removed_parts() -> None:
    """Files, programs and APIs of the configuration are removed; the rest stays, also unknown options."""
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


def test_directories_by_tag() -> None:
    """Everything that keeps state has a directory of its own, which depends on its tag only."""

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


def test_tailscale_gets_a_directory_by_default() -> None:
    """The core has one directory for all endpoints that name none: they would be one machine."""
    endpoints = [{"type": "tailscale", "tag": tag} for tag in ("a", "A")] + [{"type": "wireguard", "tag": "w"}]

    def kept(endpoints: list[dict[str, Any]]) -> list[str | None]:
        whole = rendered(planned(endpoints=endpoints, allow="tailscale"))
        return [endpoint.get("state_directory") for endpoint in whole["endpoints"]]

    found = kept(endpoints)
    assert len(set(found)) == 3 and found[2] is None
    named = [{**endpoint, "state_directory": "/etc"} for endpoint in endpoints[:2]]
    assert kept(named) == found[:2]


def test_a_build_without_exact_counters() -> None:
    """There is a warning."""
    assert "with_v2ray_api" in "".join(planned(counts=False).warnings)
    assert not planned().warnings


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        (Inbound("t", "vless"), {"flow": "unknown"}, "flow"),
        (Inbound("t", "vless"), {"id": "x" * 31}, "UUID"),
        (
            Inbound("t", "shadowsocks", method="aes-256-gcm"),
            {"method": "aes-128-gcm"},
            "that of the inbound is 'aes-256-gcm'",
        ),
        (Inbound("t", "tuic"), {"password": ""}, "vless.id and trojan.password"),
        (Inbound("t", "tuic"), {"id": ""}, "vless.id and trojan.password"),
        (Inbound("t", "http"), {"email": "a:b"}, "colon"),
        (Inbound("t", "socks"), {"password": "x" * 256}, "255"),
    ],
)
def test_unusable_credentials(kind: Inbound, more: dict[str, str], why: str) -> None:
    """The error has the reason."""
    with pytest.raises(Unusable, match=why):
        BUILDERS[kind.type](kind, person(**more))


@pytest.mark.parametrize("kind", sorted(BUILDERS))
def test_an_empty_credential_is_none(kind: str) -> None:
    """With some types it would let all clients in."""
    method = "2022-blake3-aes-128-gcm" if kind == "shadowsocks" else ""
    assert BUILDERS[kind](Inbound("t", kind, method=method), person(id="", password="")) is None
    assert name_of(random_entry(Inbound("t", kind, method=method))).startswith("nobody-")


def test_the_flow_only_where_it_works() -> None:
    """Vision needs TLS and no transport: elsewhere a user with it could not connect at all."""
    made = planned(
        {"type": "vless", "tag": "tls", "tls": {"enabled": True}},
        {"type": "vless", "tag": "ws", "tls": {"enabled": True}, "transport": {"type": "ws"}},
        {"type": "vless", "tag": "raw"},
    )
    accounts = [made.account(tag, person(flow="xtls-rprx-vision")) for tag in made.tags]
    assert [json.loads(account.packed)["flow"] for account in accounts if account] == ["xtls-rprx-vision", "", ""]


@given(st.text(min_size=1))
def test_any_name_is_read_back(name: str) -> None:
    """From the bytes of an entry, with any characters."""
    for kind in ("trojan", "vmess"):
        account = BUILDERS[kind](Inbound("t", kind), person(name))
        assert account and name_of(account.packed) == name


def test_live_users_are_in_a_file_of_their_own() -> None:
    """They are not in the configuration; their names have no slash, and they have counters."""
    made = planned(
        {"type": "shadowsocks", "tag": "s", "method": "aes-256-gcm", "users": [{"name": "own"}]},
        {"type": "vless", "tag": "v"},
        {"type": "shadowsocks", "tag": "none", "method": "none", "managed": True},
    )
    assert made.live == ["s"]
    account = made.account("s", person("a/b"))
    assert account
    target = {"s": {"a/b": account.packed}, "v": {}}
    api = ApiAddress.new(lambda count: range(1, count + 1), True, True)
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


def test_users_by_inbound() -> None:
    """Each inbound has another name for a user, which rules, counters and the file of live users have, too.

    Where users log in by their names these stay.
    """
    kinds = {"v": "vless", "s": "shadowsocks", "m": "mixed"}
    made = planned(
        *(
            {"type": kind, "tag": tag, **({"method": "aes-256-gcm"} if tag == "s" else {})}
            for tag, kind in kinds.items()
        ),
        route={"rules": [{"type": "logical", "mode": "or", "rules": [{"auth_user": ["a/b"]}, {"port": [1]}]}]},
        dns={"rules": [{"auth_user": "c", "server": "x"}]},
    )
    packed = {tag: account.packed for tag in kinds if (account := made.account(tag, person("a/b")))}
    target = {tag: {"a/b": packed[tag]} for tag in kinds}
    assert made.aliased == ["v", "s"]
    aliases = Aliases(made.aliased)
    api = ApiAddress.new(lambda count: range(1, count + 1), True, True)
    whole = json.loads(render(made, api, target, "/file", aliases))
    v, s, m = f"a/b{SEPARATOR}0", label(f"a/b{SEPARATOR}1"), "a/b"
    assert [user["name"] for user in whole["inbounds"][0]["users"]] == [v]
    assert [user["username"] for user in whole["inbounds"][2]["users"]] == [m]
    assert {*whole["experimental"]["v2ray_api"]["stats"]["users"]} == {v, s, m}
    assert whole["route"]["rules"][1]["rules"][0]["auth_user"][:3] == [m, v, unslashed(s)]
    assert s in whole["route"]["rules"][1]["rules"][0]["auth_user"] and whole["route"]["rules"][1]["rules"][1] == {
        "port": [1]
    }
    assert whole["dns"]["rules"][0]["auth_user"] == ["c", f"c{SEPARATOR}0", f"c{SEPARATOR}1"]
    (file,) = json.loads(roll(made, api, target, aliases))["endpoints"].values()
    assert file["users"].keys() == {s}
    assert {*map(unlabelled, (v, s, m))} == {"a/b"}


def test_thousands_of_inbounds() -> None:
    """The time to parse and write a configuration is proportional to their number."""
    began = time.process_time()
    made = planned(*({"type": "trojan", "tag": f"inbound {number}"} for number in range(6000)))
    account = made.account("inbound 5", person("anna"))
    assert account
    whole = rendered(made, {tag: {} for tag in made.tags} | {"inbound 5": {"anna": account.packed}})
    assert [len(inbound["users"]) for inbound in whole["inbounds"]] == [1] * 6000
    assert whole["inbounds"][5]["users"] == [json.loads(account.packed)]
    assert time.process_time() - began < 2


def test_listening_sockets() -> None:
    """By port, in any order; only options of the socket count."""
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
def test_exclusive_parts(what: Any, word: str) -> None:
    """Each is named."""
    [line] = planned(*what.pop("inbounds", []), allow="tailscale,tun,resolved,tor", **what).exclusive
    assert word in line


def test_parts_that_several_processes_can_have() -> None:
    """Removed parts, a cache file and APIs, are no obstacle to a second process."""
    left_out = {"cache_file": {"enabled": True, "path": "/x"}, "clash_api": {"external_controller": "127.0.0.1:1"}}
    made = planned({"type": "vless", "tag": "a"}, experimental=left_out, services=[{"type": "api"}])
    assert made.exclusive == []
    assert "cache_file" in "".join(made.warnings)


def test_ports_can_be_shared() -> None:
    """Those of all inbounds, managed or not."""
    inbounds = [
        {"type": kind, "tag": kind, "listen_port": 5 + at}
        for at, kind in enumerate(("vless", "mixed", "direct", "tuic"))
    ]
    assert all(inbound["reuse_addr"] for inbound in planned(*inbounds, exclude=frozenset({"vless"})).tree["inbounds"])


def test_multipath_tcp_is_off() -> None:
    """In every inbound, managed or not, with a note."""
    path = {"tcp_multi_path": True}
    made = planned(
        *({"type": kind, "tag": kind, "listen_port": at, **path} for at, kind in enumerate(("vless", "mixed"), 5)),
        {"type": "tuic", "tag": "tuic", "listen_port": 7, "tcp_multi_path": False},
    )
    assert not any("tcp_multi_path" in inbound for inbound in made.tree["inbounds"])
    assert [note.split()[2] for note in made.notes] == ["'vless'", "'mixed'"]


QUIC = {"transport": {"type": "quic"}}


def test_udp_ports() -> None:
    """Ports where clients have sessions, and ports where datagrams are independent."""
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
def test_two_inbounds_with_one_port(one: dict[str, Any], other: dict[str, Any], clash: bool) -> None:
    """On the same network and address they clash: each would get some of the connections."""
    inbounds = [{"listen_port": 5, "tag": tag, **inbound} for tag, inbound in (("a", one), ("b", other))]
    if not clash:
        planned(*inbounds)
        return
    with pytest.raises(InvalidConfig, match="'a' and 'b' have the same port 5"):
        planned(*inbounds)


@pytest.mark.parametrize("kind", sorted(BUILDERS))
def test_another_spelling_of_the_name(kind: str) -> None:
    """The credential is the same with any type; only where the name is the login does the core notice."""

    def entry(email: str, password: str = "secret") -> bytes:
        account = BUILDERS[kind](Inbound("a", kind), person(email, password=password, id=password))
        assert account
        return account.packed

    spelled, other = entry("Anna@x"), entry("anna@x")
    assert alike(spelled, other) and not alike(spelled, entry("anna@x", "another"))
    assert not alike(spelled, None) and alike(None, None)
    assert not logs_in_otherwise(spelled, spelled)
    assert logs_in_otherwise(spelled, other) == (kind in ("naive", "mixed", "socks", "http"))
