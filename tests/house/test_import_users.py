"""Exports of panels become users files for nodectl: each format, users who are left out, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given

from node.nodectl import users_file
from protos import service_pb2 as pb
from scripts.import_users import main, parse
from tests.node.nodectl.test_users_file import JSONS

NOW = 1_800_000_000.0
ANN = pb.User(email="ann", inbounds=["in"], proxies=pb.Proxy(vless=pb.Vless(id="1", flow="f")))


def users(text: str, *inbounds: str) -> list[pb.User]:
    return list(parse(text, inbounds, NOW).users.values())


def faults(text: str, *inbounds: str) -> list[str]:
    with pytest.raises(ValueError) as raised:
        users(text, *inbounds)
    return str(raised.value).splitlines()


def marzban(**more: Any) -> dict[str, Any]:
    vless = {"id": "1", "flow": "f", "unknown": 5}
    return {"username": "ann", "proxies": {"vless": vless, "ssh": {}}, "inbounds": {"vless": ["in"]}, **more}


def test_users_of_marzban() -> None:
    """Users by their names, with the fields that a node knows."""
    assert users(json.dumps({"users": [marzban(status="active", expire=NOW + 1)], "total": 1})) == [ANN]
    [bob] = users(
        json.dumps([marzban(username="bob", status="on_hold", expire=None, inbounds={"a": ["y", "x"], "b": ["x"]})])
    )
    assert list(bob.inbounds) == ["x", "y"]
    [cid] = users(json.dumps([{"username": "cid", "proxy_settings": {"trojan": {"password": "p"}}}]), "in")
    assert (cid.proxies.trojan.password, list(cid.inbounds)) == ("p", ["in"])
    [dan] = users(json.dumps([marzban(proxies={"vless": {"id": "1", "flow": "none"}, "Trojan": {"password": None}})]))
    assert dan.proxies == pb.Proxy(vless=pb.Vless(id="1"), trojan=pb.Trojan())


def test_users_left_out_of_a_panel() -> None:
    """By the panel's status, or because they expired; times in seconds or as dates."""
    people = [
        marzban(username=name, status=status, expire=expire)
        for name, status, expire in (
            ("a", "disabled", None),
            ("b", "limited", 0),
            ("c", "active", NOW - 1),
            ("d", "active", "2020-01-01T00:00:00Z"),
            ("e", "active", "2020-01-01T00:00:00"),
            ("f", "active", "2099-01-01"),
        )
    ]
    supply = parse(json.dumps(people), (), NOW)
    assert (list(supply.users), supply.left_out) == (["f"], {"disabled": 1, "limited": 1, "expired": 3})
    assert "not a time" in faults(json.dumps([marzban(expire=10**400)]))[0]
    assert faults(json.dumps([marzban(expire="soon")])) == ["line 1, user 1: expire is 'soon', which is not a time"]


def xui(**more: Any) -> dict[str, Any]:
    client = {"id": "1", "flow": "f", "email": "ann", "enable": True, "expiryTime": 0}
    return {"protocol": "vless", "tag": "in", "settings": json.dumps({"clients": [client]}), **more}


def test_inbounds_of_3x_ui() -> None:
    """One inbound, several, a reply, and a configuration; a client of several is one user."""
    for document in (xui(), [xui()], {"success": True, "obj": [xui()]}, {"inbounds": [xui()]}):
        assert users(json.dumps(document)) == [ANN]
    trojan = {"protocol": "trojan", "tag": "b", "settings": {"clients": [{"password": "p", "email": "ann"}]}}
    door = {"protocol": "dokodemo-door", "tag": "c", "settings": {"address": "1.1.1.1"}}
    [ann] = users(json.dumps([xui(), trojan, door]))
    assert (list(ann.inbounds), ann.proxies.vless.id, ann.proxies.trojan.password) == (["b", "in"], "1", "p")
    another = xui(tag="d", settings={"clients": [{"id": "2", "email": "ann"}]})
    assert faults(json.dumps([xui(), another])) == [
        "line 1, ann: ann has two different vless ids: a user of a node has one"
    ]


def test_users_left_out_of_3x_ui() -> None:
    """Users are left out only if all their inbounds are off. Times are milliseconds; negative ones have not begun."""

    def one(tag: str, **client: Any) -> dict[str, Any]:
        return xui(tag=tag, settings={"clients": [{"id": "1", "email": "ann", **client}]})

    def read(*inbounds: Any) -> Any:
        supply = parse(json.dumps(inbounds), (), NOW)
        return [list(user.inbounds) for user in supply.users.values()], supply.left_out

    assert read(one("a", enable=False)) == ([], {"disabled": 1})
    assert read(xui(enable=False)) == ([], {"disabled": 1})
    assert read(one("a", expiryTime=NOW * 1000 - 1)) == ([], {"expired": 1})
    assert read(one("a", expiryTime=-1000)) == ([["a"]], {})
    assert read(one("a", enable=False), one("b")) == ([["b"]], {})
    assert faults(json.dumps([xui(settings="{")]))[0].startswith("inbound 1: its settings are not JSON")
    assert faults(json.dumps([xui(settings={"clients": [{"id": "1"}]})])) == ["inbound 1: a client has no email"]


def test_nodectl_reads_what_is_printed(tmp_path: Path) -> None:
    """The program prints a users file, and counts on standard error the users left out."""
    export, file = tmp_path / "export.json", tmp_path / "users.json"
    bob = marzban(username="bob", inbounds=None, proxies={"Trojan": {"password": "p\x9b"}, "vless": {}})
    export.write_text(json.dumps([marzban(), bob, marzban(username="cid", status="disabled")]))
    done = CliRunner().invoke(main, [str(export), "--inbound", "far"])
    assert (done.exit_code, done.stderr) == (0, f"{export}: 1 user left out: disabled\n")
    file.write_text(done.stdout)
    proxies = pb.Proxy(vless=pb.Vless(), trojan=pb.Trojan(password="p\x9b"))
    assert users_file.read(file) == [ANN, pb.User(email="bob", inbounds=["far"], proxies=proxies)]
    export.write_text("{}")
    done = CliRunner().invoke(main, [str(export)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{export} cannot be used: no users found in a known shape" in done.stderr


@given(JSONS)
def test_any_document(document: Any) -> None:
    """It has users, or an error that says why not."""
    try:
        found = users(json.dumps(document))
    except ValueError as error:
        assert str(error)
    else:
        assert all(user.email and user.inbounds for user in found)
