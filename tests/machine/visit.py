"""A controller and a user of a node in another network namespace.

`python -m tests.machine.visit start|use|stay|crowd|remove PEM KEY FILE`

`start` starts an Xray with one user, whom it writes to FILE. `start` and `use` download a megabyte as the user, and
wait until the node has counted it. They print the node's info as JSON, without warnings about the tests' old Xray.

`stay` keeps that user connected while others connect repeatedly, until a file FILE.over exists; it creates FILE.there
when they are connected. It prints how many echoes the first one got, how many others were served, the longest time in
seconds without one, and as `dropped` why the first connection ended, if it did.

`crowd` starts an Xray with ten users, who keep 200 connections open and make new ones. It ends like `stay`, and prints
how many connections are `live` at the end, why others were `dropped`, and how many new ones were `opened` and `failed`.

`remove` starts an Xray with three users on VLESS and on Shadowsocks-2022, each connected to both. It removes one user,
changes the configuration, and removes another one, while two cores share the ports. It prints the node's info, after
how many seconds each removed user's connections ended (`took`), which others were `dropped` and how many `kept`.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path

from protos.service_pb2 import UsersStat
from scripts.staging import certs, transfer
from scripts.staging.activity import Activity
from scripts.staging.controller import Controller, RpcController
from scripts.staging.core import XrayClient
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import SERVER_NAME, kinds
from scripts.staging.ports import free_port
from scripts.staging.target import Address
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, gets_in, member, run, stays_out, way

_SIZE = 1024 * 1024
_PAUSE = 0.02
# Users of the crowd, the live connections of each, and seconds between two new ones of each.
_USERS, _LIVE, _BETWEEN = 10, 20, 0.2


def visit(what: str, node: Address, file: Path) -> dict[str, object]:
    """Serve the user. Returns the node's info afterwards."""
    with closing(RpcController(node)) as controller, EchoServer() as echo, tempfile.TemporaryDirectory() as directory:
        kind = kinds(certs.make(Path(directory), [SERVER_NAME]), cover_port=1)["vless-raw"]
        if what == "start":
            file.write_text(json.dumps([Place(kind, "main").port, asdict(TestUser.new("visitor"))]))
        port, person = json.loads(file.read_text())
        place, visitor = Place(kind, "main", port), TestUser(**person)
        if what == "start":
            run(controller, [place], [member(visitor, place)])
        until(lambda: controller.info().running, 60, "the backend runs")
        _served(controller, place, visitor, echo)
        return _info(controller)


def _info(controller: Controller) -> dict[str, object]:
    info = controller.info()
    warnings = [warning for warning in info.warnings if "safer core" not in warning]
    return {"version": info.version, "core": info.core_version, "warnings": warnings}


def stay(file: Path) -> dict[str, object]:
    port, person = json.loads(file.read_text())
    there, over = (file.with_name(f"{file.name}.{word}") for word in ("there", "over"))
    with EchoServer() as echo, tempfile.TemporaryDirectory() as directory:
        kind = kinds(certs.make(Path(directory), [SERVER_NAME]), cover_port=1)["vless-raw"]
        place, visitor = Place(kind, "main", port), TestUser(**person)
        with way(place, visitor) as entrance, transfer.connect(entrance, echo) as link:
            echoed, came, dropped, served, longest = 0, 0, "", time.monotonic(), 0.0
            last = False
            while not last:
                last = over.exists()
                try:
                    if not dropped:
                        transfer.echo(link, bytes(1000))
                        echoed += 1
                except OSError as error:
                    dropped = str(error)
                with suppress(OSError), transfer.connect(entrance, echo) as other:
                    transfer.echo(other, b"new")
                    came, longest, served = came + 1, max(longest, time.monotonic() - served), time.monotonic()
                there.touch()
                time.sleep(_PAUSE)
            longest = max(longest, time.monotonic() - served)
    return {"echoed": echoed, "came": came, "longest": longest, "dropped": dropped}


def crowd(node: Address, file: Path) -> dict[str, object]:
    there, over = (file.with_name(f"{file.name}.{word}") for word in ("there", "over"))
    with ExitStack() as stack:
        controller, echo = stack.enter_context(closing(RpcController(node))), stack.enter_context(EchoServer())
        kind = kinds(certs.make(Path(stack.enter_context(tempfile.TemporaryDirectory())), [SERVER_NAME]), cover_port=1)
        place = Place(kind["vless-raw"], "main")
        users = [TestUser.new(f"user{number}") for number in range(_USERS)]
        run(controller, [place], [member(each, place) for each in users])
        routes = {free_port(): place.kind.outbound(place.port, each) for each in users}
        stack.enter_context(XrayClient(routes))
        crowd = [stack.enter_context(Activity(port, echo, _LIVE, _BETWEEN)) for port in routes]
        there.touch()
        until(over.exists, 600, "the test is over")
        for each in crowd:
            each.rest()
            for link in each.links:
                each.say(link, 200)
        return {
            "live": sum(len(each.links) for each in crowd),
            "dropped": [reason for each in crowd for reason in each.dropped],
            "opened": sum(len(each.opened) for each in crowd),
            "failed": [reason for each in crowd for reason in each.failed],
        }


def remove(node: Address) -> dict[str, object]:
    with ExitStack() as stack:
        controller, echo = stack.enter_context(closing(RpcController(node))), stack.enter_context(EchoServer())
        known = kinds(certs.make(Path(stack.enter_context(tempfile.TemporaryDirectory())), [SERVER_NAME]), cover_port=1)
        places = [Place(known["vless-raw"], "main"), Place(known["shadowsocks-2022-aes-128"], "shared")]
        anna, bert, carl = users = [TestUser.new(name) for name in ("anna", "bert", "carl")]
        run(controller, places, [member(each, *places) for each in users], log={"loglevel": "warning"})
        routes = {free_port(): (place, each) for place in places for each in users}
        stack.enter_context(XrayClient({port: place.outbound(each) for port, (place, each) in routes.items()}))
        links = {
            (place.tag, each): stack.enter_context(closing(transfer.connect(port, echo)))
            for port, (place, each) in routes.items()
        }
        took = {}
        for person, left in ((bert, [anna, carl]), (carl, [anna])):
            if person is carl:
                run(controller, places, [member(each, *places) for each in (anna, carl)], log={"loglevel": "error"})
            began = time.monotonic()
            controller.sync_user(member(person))
            for place in places:
                link = links.pop((place.tag, person))
                until(lambda link=link: _ended(link), 10, "a removed user's connection ends")  # type: ignore[misc]
                took[f"{person.email} {place.tag}"] = time.monotonic() - began
            assert all(stays_out(place, person, echo) for place in places)
            assert all(gets_in(place, each, echo) for place in places for each in left)
        dropped = [f"{person.email} {tag}" for (tag, person), link in links.items() if _ended(link)]
        return {**_info(controller), "took": took, "dropped": dropped, "kept": len(links) - len(dropped)}


def _ended(link: socket.socket) -> bool:
    try:
        transfer.small_echo(link, b"still there")
    except OSError:
        return True
    return False


def _served(controller: Controller, place: Place, visitor: TestUser, echo: EchoServer) -> None:
    controller.stats(UsersStat, reset=True)
    with connection(place, visitor, echo) as link:
        transfer.download(link, _SIZE)
    until(lambda: _counted(controller, visitor) >= _SIZE, 30, "the node has counted it")


def _counted(controller: Controller, visitor: TestUser) -> int:
    return sum(stat.value for stat in controller.stats(UsersStat).stats if stat.name == visitor.email)


if __name__ == "__main__":
    _what, _pem, _key, _file = sys.argv[1:]
    _node = Address("127.0.0.1", 62051, 62050, _key, Path(_pem).read_text())
    _done = {
        "stay": lambda: stay(Path(_file)),
        "crowd": lambda: crowd(_node, Path(_file)),
        "remove": lambda: remove(_node),
    }.get(_what, lambda: visit(_what, _node, Path(_file)))
    print(json.dumps(_done()))
