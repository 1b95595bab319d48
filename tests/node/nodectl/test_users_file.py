"""Users files: tables and JSON of this interface, users who are left out, and errors."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.contract.accounts import key_of
from node.nodectl.output import Unusable, as_json
from node.nodectl.users_file import COLUMNS, LISTED, parse, read
from protos import service_pb2 as pb


def users(text: str, *inbounds: str) -> list[pb.User]:
    return list(parse(text, inbounds).users.values())


def faults(text: str, *inbounds: str) -> list[str]:
    with pytest.raises(ValueError) as raised:
        users(text, *inbounds)
    return str(raised.value).splitlines()


ANN = pb.User(email="ann", inbounds=["in"], proxies=pb.Proxy(vless=pb.Vless(id="1", flow="f")))


# Tables


def test_table() -> None:
    """Each column sets its field; a protocol's own column wins over one for several."""
    text = (
        "Name, inbounds ,id,vless_id,password,hysteria_auth,method,flow,wireguard_public_key,wireguard_addresses\n"
        'ann,"in|another, one",u,v,p,h,m,f,k,10.0.0.2|fd00::2/128\n'
        "\n"
        "bob,in,,,,,,,,\n"
    )
    ann, bob = users(text)
    assert list(ann.inbounds) == ["in", "another, one"]
    has = ann.proxies
    assert (has.vless.id, has.vless.flow, has.vmess.id, has.trojan.password) == ("v", "f", "u", "p")
    assert (has.shadowsocks.password, has.shadowsocks.method, has.hysteria.auth) == ("p", "m", "h")
    assert (has.wireguard.public_key, list(has.wireguard.peer_ips)) == ("k", ["10.0.0.2", "fd00::2/128"])
    assert bob == pb.User(email="bob", inbounds=["in"])


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters(delimiter: str) -> None:
    """Spreadsheets export with different delimiters."""
    lines = ["name,inbounds,vless_id,flow", "ann,in,1,f"]
    assert users("\n".join(line.replace(",", delimiter) for line in lines)) == [ANN]


def test_users_left_out_of_a_table() -> None:
    """They are counted, and need no inbounds."""
    supply = parse("Email,inbounds,enabled\nann,in,yes\nbob,,No\ncid,in,0\n")
    assert (list(supply.users), supply.left_out) == (["ann"], {"disabled": 2})


def test_faults_of_a_table() -> None:
    """All are reported together, each with its line, also if a cell has several lines."""
    text = 'name,inbounds,enabled\n"a\nb",in,yes\nann,in\nANN,in,maybe\nann,in,\nAnn,,\n,in,\n'
    assert faults(text) == [
        "line 4: 2 cells, but 3 columns",
        "line 5: enabled is 'maybe': write yes or no",
        "line 7: Ann is already in line 6",
        "line 8: the user has no name",
    ]
    assert faults("name,in\nann,x\n")[0].startswith("line 1: unknown column 'in'; known are name, inbounds")
    assert faults("inbounds\nx\n") == ["line 1: the column name is missing"]
    assert faults("name,name\nx,y\n") == ["line 1: duplicate column: name"]
    assert faults("") == [f"the file is empty; the first line must have headings, of {', '.join(COLUMNS)}"]
    assert faults('name,inbounds\n"ann,in\n')[0].startswith("line 2: ")
    assert len(faults("name,inbounds\n" + "ann,in\n" * 40)) == 21


def test_inbounds_for_users_without() -> None:
    """They come from the command line; users with inbounds keep theirs."""
    assert [list(user.inbounds) for user in users("name,inbounds\nann,\nbob,b\n", "x", "y")] == [["x", "y"], ["b"]]
    assert faults("name\nann\n") == ["line 2: ann has no inbounds: add them to the file, or give --inbound"]


# JSON of this interface


def test_json_of_this_interface() -> None:
    """An array of users, an object with them, and the output of `nodectl users list`."""
    user = {"email": "ann", "inbounds": ["in"], "proxies": {"vless": {"id": "1", "flow": "f"}, "vmess": None}}
    row = pb.ListedUser(name="ann", inbounds=["in"], unknown=["far"], proxies=ANN.proxies, confirmed=["in"])
    for document in ([user], {"users": [user]}):
        assert users(json.dumps(document)) == [ANN]
    [listed] = users(json.dumps([{"node": "one", "result": {"users": as_json([row]), "total": 1}}]))
    assert listed == pb.User(email="ann", inbounds=["in", "far"], proxies=ANN.proxies)


def test_faults_of_documents() -> None:
    """Errors name the user, and the line if it is known."""
    assert faults('[\n{"email": "ann",}\n]')[0].startswith("line 2: ")
    text = '{"users": [\n{"email": "ann", "inbounds": ["in"]},\n{"email": "bob", "inbounds": "in"},\n{"inbounds": []}]}'
    assert faults(text) == ["line 3, user 2: inbounds is not an array", "user 3: the user has no name"]
    assert faults("[1]") == ["user 1 is not an object"]
    for foreign in ('{"a": 1}', '{"users": [{"username": "ann"}]}', '[{"protocol": "vless", "settings": "{}"}]'):
        assert "python -m scripts.import_users" in faults(foreign)[0]
    assert "shortened" in faults('[{"name": "ann", "shortened": true}]')[0]
    assert faults('[{"email": "ann", "inbounds": ["in"], "proxies": {"vless": {"id": 5}}}]')[0].startswith("line 1")
    assert faults("[" * 100_000)


# The file


def test_messages_to_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Left out users are counted on standard error; an error names the file."""
    file = tmp_path / "users.csv"
    file.write_text("name,inbounds,enabled\nann,in,\nbob,in,no\n", "utf-8-sig")
    assert [user.email for user in read(file)] == ["ann"]
    assert capsys.readouterr().err == f"{file}: 1 user left out: disabled\n"
    for text in (b"name,inbounds\nann,\nbob,\n", b"\xff"):
        file.write_bytes(text)
        with pytest.raises(Unusable) as raised:
            read(file)
        assert str(file) in raised.value.message
    with pytest.raises(Unusable, match="no/such"):
        read(Path("/no/such/file"))
    assert issubclass(Unusable, click.ClickException)


WORDS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=8).map(str.strip).filter(bool)
CELL = WORDS.filter(lambda word: "|" not in word)


@given(
    st.lists(
        st.tuples(CELL, st.lists(CELL, min_size=1, max_size=3, unique=True), CELL), unique_by=lambda row: key_of(row[0])
    )
)
def test_tables_are_read_as_written(rows: list[tuple[str, list[str], str]]) -> None:
    """For any cells written by the csv module."""
    file = StringIO()
    lines = csv.writer(file)
    lines.writerow(["name", "inbounds", "trojan_password"])
    lines.writerows((name, "|".join(tags), password) for name, tags, password in rows)
    found = [(user.email, list(user.inbounds), user.proxies.trojan.password) for user in users(file.getvalue())]
    assert found == rows


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "users",
                    "email",
                    "name",
                    "username",
                    "proxies",
                    "vless",
                    "id",
                    "inbounds",
                    "unknown",
                    "settings",
                    "clients",
                    "protocol",
                    "tag",
                    "enable",
                    "status",
                    "expire",
                    "expiryTime",
                    "obj",
                    "result",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(JSONS)
def test_any_document(document: Any) -> None:
    """It has users, or an error that says why not."""
    _read(json.dumps(document))


@given(st.text())
def test_any_text(text: str) -> None:
    """The same for any text, and any table."""
    _read(text)
    _read(f"name,inbounds,enabled\n{text}")


def _read(text: str) -> None:
    try:
        found = users(text)
    except ValueError as error:
        assert str(error)
    else:
        assert all(user.email and user.inbounds for user in found)


class Searched(str):
    """A string that counts its searches."""

    looks = 0

    def find(self, *arguments: Any) -> int:
        self.looks += 1
        return super().find(*arguments)


def test_large_documents_are_not_searched_for_each_user() -> None:
    """Lines are searched only for reported faults: for all of 100,000 users it took an hour."""
    good = Searched(json.dumps([{"email": f"user{number}", "inbounds": ["in"]} for number in range(1000)]))
    assert (len(parse(good).users), good.looks) == (1000, 0)
    for bad in ([{"email": f"user{number}"} for number in range(1000)], [{"email": "ann", "inbounds": ["in"]}] * 1000):
        text = Searched(json.dumps(bad))
        with pytest.raises(ValueError, match="more faults"):
            parse(text)
        assert text.looks <= 2 * LISTED


def test_unknown_inbounds_that_are_not_an_array() -> None:
    (fault,) = faults('[{"email": "ann", "inbounds": ["in"], "unknown": 5}]')
    assert fault.endswith("inbounds is not an array")


def test_faults_do_nothing_to_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Users files, and so the names in errors, may come from others."""
    file = tmp_path / "users.json"
    file.write_text(json.dumps([{"email": "ann\x1b[2J\x9b2J", "inbounds": ["in"]}] * 2))
    with pytest.raises(Unusable) as raised:
        read(file)
    raised.value.show()
    shown = capsys.readouterr().err
    assert "ann\\x1b[2J\\x9b2J" in shown
    assert shown.replace("\n", "").isprintable()
