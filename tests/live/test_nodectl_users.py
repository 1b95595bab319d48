"""`nodectl users` as a program against a real node and real traffic: files become users, and differences are shown."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from node.nodectl.output import Exit
from protos import service_pb2 as pb
from scripts.staging import transfer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.protocols import vless
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import SOURCE, TRANSPORTS, Place, connection, gets_in, run, stays_out
from tests.harness.forked import Done
from tests.harness.nodectl import ROOT, Nodectl
from tests.live.test_removed_users import ended

VLESS = Kind("vless-raw", vless(), raw())
HOME = Place(VLESS, "in")


class Ctl:
    """The program, with a file of one node."""

    def __init__(self, directory: Path, node: NodeProcess, transport: str) -> None:
        self.directory = directory
        self.program = Nodectl(directory)
        self.program.add("one", node, transport)

    def __call__(self, *words: str, code: Exit = Exit.OK) -> Done:
        done = self.program("--node", "one", "users", *words)
        assert done.code == code, (words, done)
        return done

    def result(self, *words: str, code: Exit = Exit.OK) -> Any:
        """The only node's result."""
        (answer,) = self(*words, "--json", code=code).json
        assert answer["node"] == "one"
        return answer["result"]

    def states(self) -> dict[str, list[str]]:
        return {row["name"]: row["confirmed"] for row in self.result("list")["users"]}

    def table(self, users: Sequence[TestUser], more: Sequence[Mapping[str, str]] = ()) -> str:
        """A file of these users; returns its name."""
        with (self.directory / "users.csv").open("w", newline="") as file:
            lines = csv.DictWriter(file, ["name", "inbounds", "vless_id", "enabled"])
            lines.writeheader()
            lines.writerows({"name": user.email, "inbounds": HOME.tag, "vless_id": str(user.uuid)} for user in users)
            lines.writerows(more)
        return "users.csv"


@pytest.fixture(params=list(TRANSPORTS))
def ctl(node: NodeProcess, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ctl]:
    """The program over each transport in turn; a backend without users."""
    with_backend = TRANSPORTS["grpc"](node)
    try:
        run(with_backend, [HOME])
        with_backend.sync_users([])
    finally:
        with_backend.close()
    yield Ctl(tmp_path, node, request.param)


# Independent of the transport.
once = pytest.mark.parametrize("ctl", ["grpc"], indirect=True)


def people(*names: str) -> list[TestUser]:
    return [TestUser.new(name) for name in names]


@pytest.mark.slow
def test_a_table_becomes_users(ctl: Ctl, echo: EchoServer) -> None:
    """Users of the file are admitted, and the difference is empty then; users who leave it are cut, others stay."""
    ann, bob, cid = people("ann", "bob", "cid")
    file = ctl.table(
        [ann, bob], [{"name": "dan", "inbounds": HOME.tag, "vless_id": str(uuid.uuid4()), "enabled": "no"}]
    )
    told = ctl.result("diff", file, code=Exit.DIFFERENT)
    assert (told["added"], told["changed"], told["removed"]) == (["ann", "bob"], [], [])
    assert "1 user left out: disabled" in ctl("sync", file, "--dry-run", code=Exit.DIFFERENT).err
    assert ctl.states() == {}

    assert ctl.result("sync", file) == {"added": 2, "changed": 0, "removed": 0, "same": 0, "refused": []}
    assert ctl.result("diff", file)["same"] == 2
    assert ctl.states() == {"ann": ["in"], "bob": ["in"]}
    assert gets_in(HOME, bob, echo)

    with connection(HOME, ann, echo) as link:
        file = ctl.table([ann, cid])
        drastic = ctl("sync", file, code=Exit.USAGE).err
        assert "1 of 2 users would be removed: bob" in drastic and "--yes" in drastic
        assert ctl.states().keys() == {"ann", "bob"}
        assert ctl.result("sync", file, "--yes")["removed"] == 1
        assert stays_out(HOME, bob, echo)
        assert gets_in(HOME, cid, echo)
        transfer.echo(link, b"still there")


@pytest.mark.slow
def test_one_by_one(ctl: Ctl, echo: EchoServer) -> None:
    """An added user can use the given credentials; changed ones apply, and a removed user is cut."""
    (made,) = ctl.result("add", "eve", "--inbound", HOME.tag)["users"]
    assert not made["refused"]
    eve = TestUser("eve", made["user"]["proxies"]["vless"]["id"], "unused")
    assert gets_in(HOME, eve, echo)
    assert "already on the node: eve" in ctl("add", "eve", "--inbound", HOME.tag, code=Exit.FAILED).err

    (renewed,) = ctl.result("change", "EVE", "--renew")["users"]
    assert stays_out(HOME, eve, echo)
    again = TestUser("eve", renewed["user"]["proxies"]["vless"]["id"], "unused")
    assert again.uuid != eve.uuid and gets_in(HOME, again, echo)
    assert ctl.result("change", "eve", "--id", eve.uuid)["users"][0]["user"]["inbounds"] == [HOME.tag]
    assert gets_in(HOME, eve, echo)

    assert "no user 'nobody'" in ctl("remove", "eve", "nobody", code=Exit.FAILED).err
    assert ctl.states() == {"eve": ["in"]}
    assert ctl.result("remove", "eve")["users"] == [{"name": "eve", "out": True}]
    assert stays_out(HOME, eve, echo)
    assert ctl.states() == {}


@pytest.mark.slow
def test_who_is_refused(ctl: Ctl) -> None:
    """Each refused user is shown with the reason, after a sync and in the list; the others are admitted."""
    ann, bob = people("ann", "bob")
    twin = {"name": "twin", "inbounds": HOME.tag, "vless_id": str(ann.uuid)}
    file = ctl.table([ann, bob], [twin, {"name": "lost", "inbounds": "nowhere", "vless_id": str(uuid.uuid4())}])
    done = ctl("sync", file, code=Exit.USERS_REFUSED)
    assert "twin was refused: in: 'ann' has the same credential" in done.err
    assert "lost was refused: the node has none of their inbounds" in done.err
    rows = ctl("list", "--unconfirmed").out.splitlines()
    assert len(rows) == 2 and rows[1].split()[:3] == ["twin", "in", "refused"]
    assert "has the same credential" in rows[1]
    (refused,) = ctl.result("add", "worse", "--inbound", "in", "--id", "no id " * 10, code=Exit.USERS_REFUSED)["users"]
    assert refused["refused"] == "in: the id is not a UUID"


@pytest.mark.slow
@once
def test_what_is_listed_is_a_file(ctl: Ctl) -> None:
    """The list of one node is a file of users for another one; it has secrets only on request."""
    ctl("sync", ctl.table(people("ann", "bob", "cid")))
    ids = [str(row["proxies"]["vless"]["id"]) for row in ctl.result("list", "--credentials")["users"]]
    assert not any(each in ctl("list", "--wide").out + ctl("list", "--json").out for each in ids)
    (ctl.directory / "listed.json").write_text(ctl("list", "--credentials", "--json").out)
    assert ctl.result("diff", "listed.json")["same"] == 3
    ctl("remove", "ann", "bob", "cid")
    assert ctl.result("sync", "listed.json")["added"] == 3
    assert ctl.states() == {name: ["in"] for name in ("ann", "bob", "cid")}


@pytest.mark.slow
@once
def test_exports_of_panels(ctl: Ctl, echo: EchoServer) -> None:
    """Panels' exports become users who can connect; disabled and expired ones are skipped and counted."""

    def imported(document: Any) -> str:
        export = ctl.directory / "export.json"
        export.write_text(json.dumps(document))
        command = [sys.executable, "-m", "scripts.import_users", str(export)]
        with (ctl.directory / "imported.json").open("w") as file:
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.PIPE, text=True, check=True)
        return done.stderr

    ann, bob, cid = people("ann", "bob", "cid")
    marzban: list[dict[str, Any]] = [
        {"username": who.email, "proxies": {"vless": {"id": str(who.uuid), "flow": ""}}, "inbounds": {"vless": ["in"]}}
        for who in (ann, bob, cid)
    ]
    marzban[1]["status"], marzban[2]["expire"] = "limited", 1_600_000_000
    told = imported({"users": marzban, "total": 3})
    ctl("sync", "imported.json")
    assert "1 user left out: limited" in told and "1 user left out: expired" in told
    assert ctl.states() == {"ann": ["in"]}
    clients = [{"id": str(who.uuid), "email": who.email, "enable": who is not cid} for who in (ann, bob, cid)]
    inbound = {"protocol": "vless", "tag": "in", "enable": True, "settings": json.dumps({"clients": clients})}
    imported({"success": True, "obj": [inbound]})
    assert "scripts.import_users" in ctl("sync", "export.json", code=Exit.USAGE).err
    assert ctl.result("sync", "imported.json") == {"added": 1, "changed": 0, "removed": 0, "same": 1, "refused": []}
    assert gets_in(HOME, bob, echo)
    assert stays_out(HOME, cid, echo)


@once
def test_a_file_that_cannot_be_used(ctl: Ctl) -> None:
    """Each fault is shown with its line, and the node is not called."""
    (ctl.directory / "bad.csv").write_text("name,inbounds,id\nann,in,x\n\nann,in,y\nbob,,z\n")
    told = ctl("sync", "bad.csv", code=Exit.USAGE).err
    assert "line 4: ann is already in line 2" in told and "line 5: bob has no inbounds" in told


@pytest.mark.slow
@once
def test_many(ctl: Ctl) -> None:
    """More users than fit into one call, or on one page."""
    users = [pb.User(email=f"user {number}") for number in range(6001)]
    with (ctl.directory / "many.csv").open("w") as file:
        file.write("name\tinbounds\tid\n")
        file.writelines(f"{user.email}\tin\t{uuid.uuid4()}\n" for user in users)
    assert ctl.result("sync", "many.csv")["added"] == 6001
    listed = ctl.result("list")
    assert (len(listed["users"]), listed["total"], listed["changed"]) == (6001, 6001, False)
    assert ctl.result("diff", "many.csv")["same"] == 6001


@pytest.mark.slow
@once
def test_many_are_to_go(ctl: Ctl) -> None:
    """On a terminal nodectl asks before many removals; no, and Ctrl-C, change nothing."""
    ctl("sync", ctl.table(people("ann", "bob")))
    command = "--node", "one", "users", "sync", ctl.table(people("cid"))
    for answer, code in (("n\n", Exit.USAGE), ("\x03", Exit.INTERRUPTED)):
        with ctl.program.terminal(*command) as terminal:
            terminal.find("2 of 2 users would be removed: ann, bob", "Remove them?")
            terminal.type(answer)
            assert terminal.wait() == code
        assert ctl.states().keys() == {"ann", "bob"}
    with ctl.program.terminal(*command) as terminal:
        terminal.find("Remove them?")
        terminal.type("y\n")
        assert terminal.wait() == Exit.OK
    assert ctl.states() == {"cid": ["in"]}


@pytest.mark.slow
@once
def test_limits(ctl: Ctl) -> None:
    """Limits are set, listed and removed; barred users are listed as such; a change of a user keeps their limits."""
    ctl("add", "anna", "bert", "--inbound", HOME.tag)
    ctl("limit", "anna", "--to", "bytes=1GB/month@5 addresses=3 down=10M")
    (row,) = ctl.result("limits")
    assert (row["name"], row["limits"]["bytes"]["bytes"], row["limits"]["addresses"]) == ("anna", 10**9, 3)
    assert row["limits"]["expires_at"] is None and row["left"] == 10**9
    ctl("limit", "bert", "--to", "expires=1")
    assert [row["off_for"] for row in ctl.result("limits", "--off")] == [["expiry"]]
    assert ctl("list", "bert").rows[-1][2] == "off"
    assert "off: expiry" in ctl("limits").out
    ctl("limit", "anna", "bert", "--clear")
    assert ctl.result("limits") == []
    assert ctl("limit", "anna", "--to", "devices=3", code=Exit.USAGE).err
    anna = {"email": "anna", "inbounds": [HOME.tag], "limits": {"addresses": 2, "expires_at": None}}
    proxies = {"vless": {"id": str(uuid.uuid4())}}
    (ctl.directory / "limits.json").write_text(json.dumps([{**anna, "proxies": proxies}]))
    ctl("sync", "limits.json", "--yes")
    ctl("change", "anna", "--id", str(uuid.uuid4()))
    (row,) = ctl.result("limits")
    assert row["limits"]["addresses"] == 2


def test_dropped(ctl: Ctl, echo: EchoServer) -> None:
    """A user's connections end and are counted, by name, address and inbound; others' do not, and all may come back."""
    ann, bob = people("ann", "bob")
    ctl("sync", ctl.table([ann, bob]))
    with connection(HOME, bob, echo) as other:
        for words in (["ann"], ["ann", "--address", SOURCE, "--inbound", "in"], ["ANN", "--inbound", "in"]):
            with connection(HOME, ann, echo) as link:
                transfer.echo(link, b"hello")
                assert ctl.result("drop", *words) == {"ended": 1, "users": 1, "unsupported": {}}
                until(lambda: ended(link), 1, "she is out")
        transfer.echo(other, b"still there")
        assert ctl("drop", "--inbound", "in").rows == [["ended", "users", "unsupported"], ["1", "1"]]
        until(lambda: ended(other), 1, "he is out")
    assert "there is no user 'nobody'" in ctl("drop", "nobody", code=Exit.FAILED).err
    assert "not an IP address" in ctl("drop", "--address", "home", code=Exit.FAILED).err
    assert "--address or --inbound" in ctl("drop", code=Exit.USAGE).err
