"""`nodectl users add`, `change` and `remove`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import click

from node.errors import InvalidRequest, UnknownName
from node.nodectl.exits import Exit, Unusable
from node.nodectl.members import PATIENCE, listed, tell
from node.nodectl.options import options
from node.nodectl.output import Row
from node.nodectl.running import Asked, Outcome, each
from node.nodectl.session import Session
from node.nodectl.users import making
from node.nodectl.users.difference import said
from node.nodectl.users.rows import missing
from protos import service_pb2 as pb

F = TypeVar("F", bound=Callable[..., Any])

_GIVEN = (
    click.option("--id", "identity", default="", metavar="UUID", help="For VLESS and VMess, instead of a new one."),
    click.option("--password", default="", help="For Trojan and Hysteria, instead of a new one."),
    click.option("--shadowsocks", default="", metavar="PASSWORD", help="For Shadowsocks, instead of a new one."),
    click.option("--flow", default="", metavar="FLOW", help="Of VLESS, such as xtls-rprx-vision."),
    click.option("--method", default="", metavar="METHOD", help="Of Shadowsocks; of 2022 it says how long its key is."),
)


def _given(function: F) -> F:
    for option in reversed(_GIVEN):
        function = option(function)
    return function


@click.command
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--inbound", "inbounds", multiple=True, required=True, metavar="TAG", help="Where they may come in.")
@click.option("--address", multiple=True, help="In a WireGuard tunnel: then they have a key for it, too.")
@_given
@options
@click.pass_obj
def add(
    session: Session, /, names: tuple[str, ...], inbounds: tuple[str, ...], address: tuple[str, ...], **given: str
) -> None:
    """Add users. Their credentials are new where none are given, and are said this once."""
    if len(names) > 1 and (address or given["identity"] or given["password"] or given["shadowsocks"]):
        raise Unusable("no two users may have the same credential or address: give them to one user at a time")
    users, private = [], ""
    for name in dict.fromkeys(names):
        made = pb.User(email=name, inbounds=inbounds, proxies=making.proxies(given["flow"], given["method"]))
        if address:
            tunnel, private = making.tunnel(address)
            made.proxies.wireguard.CopyFrom(tunnel)
        users.append(put(made, **given))

    async def work(node: Asked) -> dict[str, Any]:
        there = [row.name for row in (await listed(node, names)).users if row.inbounds or row.unknown]
        if there:
            raise InvalidRequest(f"{', '.join(there)}: there already; nodectl users change changes them")
        return await _told(node, users, private)

    _report(session, session.ask(work, PATIENCE))


@click.command
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--inbound", "inbounds", multiple=True, metavar="TAG", help="Where they may come in from now on.")
@click.option("--renew", is_flag=True, help="Give them new credentials for all protocols but WireGuard.")
@_given
@options
@click.pass_obj
def change(session: Session, /, names: tuple[str, ...], inbounds: tuple[str, ...], renew: bool, **given: str) -> None:
    """Change where users may come in, or by what. What is not said stays."""
    if not (inbounds or renew or any(given.values())):
        raise Unusable("say what to change: --inbound, --renew, or a credential")
    if len(names) > 1 and (given["identity"] or given["password"] or given["shadowsocks"]):
        raise Unusable("no two users may have the same credential: give it to one user at a time")
    fresh = {name: making.proxies(given["flow"], given["method"]) for name in names} if renew else {}

    async def work(node: Asked) -> dict[str, Any]:
        rows = (await listed(node, names, credentials=True)).users
        _require(names, rows)
        if large := [row.name for row in rows if row.shortened]:
            raise InvalidRequest(f"{', '.join(large)}: too large to be listed, and so to be changed here; sync them")
        users = []
        for name, row in ((name, row) for name in names for row in rows if not missing([name], [row])):
            user = pb.User(email=row.name, proxies=row.proxies, inbounds=inbounds or [*row.inbounds, *row.unknown])
            if row.HasField("limits"):
                user.limits.CopyFrom(row.limits)
            if renew:
                user.proxies.MergeFrom(fresh[name])
            users.append(put(user, **given))
        return await _told(node, users)

    _report(session, session.ask(work, PATIENCE))


@click.command
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@options
@click.pass_obj
def remove(session: Session, names: tuple[str, ...]) -> None:
    """Remove users: their connections end. If one of them is not there nobody is removed."""

    async def work(node: Asked) -> dict[str, Any]:
        rows = (await listed(node, names)).users
        _require(names, rows)
        await tell(node, [pb.User(email=row.name) for row in rows])
        out = missing([row.name for row in rows], (await listed(node, names)).users)
        return {"users": [{"name": row.name, "out": row.name in out} for row in rows]}

    outcomes = session.ask(work, PATIENCE)
    done = all(user["out"] for _, answer in each(outcomes) for user in answer["users"])
    session.report(outcomes, ("removed", "state"), _removed, Exit.OK if done else Exit.USERS_REFUSED)


COMMANDS = (add, change, remove)


def put(user: pb.User, identity: str, password: str, shadowsocks: str, flow: str, method: str) -> pb.User:
    """The user with what was said of their credentials."""
    proxies = user.proxies
    if identity:
        proxies.vless.id = proxies.vmess.id = identity
    if password:
        proxies.trojan.password = proxies.hysteria.auth = password
    if shadowsocks:
        proxies.shadowsocks.password = shadowsocks
    if flow:
        proxies.vless.flow = flow
    if method and method not in making.KEY_BYTES:
        proxies.shadowsocks.method = method
    return user


async def _told(node: Asked, users: Sequence[pb.User], private: str = "") -> dict[str, Any]:
    refused = dict(await tell(node, users))
    more = [{"wireguard_private_key": private, "refused": refused.get(user.email, "")} for user in users]
    return {"users": [{"user": user, **words} for user, words in zip(users, more, strict=True)]}


def _require(names: Sequence[str], rows: Sequence[pb.ListedUser]) -> None:
    if absent := missing(names, rows):
        raise UnknownName(f"there is no user {', '.join(map(repr, absent))}")


def _report(session: Session, outcomes: Sequence[Outcome[dict[str, Any]]]) -> NoReturn:
    refused = any(made["refused"] for _, answer in each(outcomes) for made in answer["users"])
    code = Exit.USERS_REFUSED if refused else Exit.OK
    session.report(outcomes, ("name", "what", "value"), _made, code)


def _made(answer: dict[str, Any]) -> Iterator[Row]:
    for made in answer["users"]:
        user: pb.User = made["user"]
        yield user.email, "inbounds", ", ".join(user.inbounds)
        for name, proxy in said(user.proxies).items():
            for field, value in proxy.ListFields():
                yield user.email, f"{name} {field.name}", value if isinstance(value, str) else ", ".join(value)
        if made["wireguard_private_key"]:
            yield user.email, "wireguard private_key", made["wireguard_private_key"]
        yield user.email, "state", f"not in: {made['refused']}" if made["refused"] else "confirmed"


def _removed(answer: dict[str, Any]) -> Iterator[Row]:
    for user in answer["users"]:
        yield user["name"], "out" if user["out"] else "still leaving"
