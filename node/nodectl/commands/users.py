"""`nodectl users` and `online`: list, add, change and remove users, show and set limits; see also `users_sync`."""

from __future__ import annotations

import base64
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import click
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from node.base.errors import InvalidRequest, UnknownName, UnknownPath, Unsupported
from node.limits import parsing
from node.nodectl.commands.users_sync import diff, sync
from node.nodectl.fleet import Node, Outcome, answers, parallel
from node.nodectl.members import (
    COLUMNS,
    LISTING,
    PATIENCE,
    TRAFFIC,
    WEIGHTED,
    WIDE,
    cells,
    listed,
    missing,
    proxies_of,
    send,
    settled,
)
from node.nodectl.output import Exit, Row, Unusable, amount, note, rate_of_bits, size
from node.nodectl.session import Session, inbound_option, options
from protos import service_pb2 as pb

_NAMES = click.argument("names", metavar="NAME...", nargs=-1, required=True)
_LIMITS = ("name", "state", "used", "of", "resets", "expires", "addresses", "down", "up", "notes")
# In the place of `used`, where bytes are weighted: as they count towards the quota, and as the core counts them.
_BOTH = ("used", "raw")
# Shadowsocks methods whose passwords are keys, and the keys' bytes. Other methods get 32 bytes as a password.
KEY_BYTES = {"2022-blake3-aes-128-gcm": 16, "2022-blake3-aes-256-gcm": 32}
_KEY = 32
_PASSWORD = 24
# Parallel calls to one node, one user each.
AT_ONCE = 64


@click.group(commands=[diff, sync])
def users() -> None:
    """Manage the users of nodes: list, add, change, remove, drop, limits, limit, diff, sync."""


@users.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--wide", is_flag=True, help="Show more columns, and the kinds of credentials (not the secrets).")
@click.option(
    "--unconfirmed", is_flag=True, help="Show only users whom the core has not confirmed in all inbounds, and why."
)
@click.option("--credentials", is_flag=True, help="With --json: include credentials; needs a key of scope all.")
@click.option("--traffic", is_flag=True, help="Show bytes by inbound, which a node counts with USER_INBOUNDS=on.")
@options
def list_users(
    session: Session, names: tuple[str, ...], wide: bool, unconfirmed: bool, credentials: bool, traffic: bool
) -> None:
    """List the users of nodes, their inbounds, and what the core has confirmed."""
    if credentials and not session.json:
        raise click.UsageError("--credentials needs --json: secrets are not shown on a screen")

    async def ask(node: Node) -> dict[str, Any]:
        found = await listed(node, names, credentials, traffic)
        if unconfirmed:
            found.users = [row for row in found.users if not settled(row)]
        return vars(found)

    outcomes = session.ask(ask, LISTING)
    for name, answer in answers(outcomes):
        if answer["changed"]:
            note(f"{name}: users changed during the listing: it may mix old and new states; list them again")
    if traffic:
        session.report(outcomes, TRAFFIC, lambda answer: chain.from_iterable(map(_bytes_of, answer["users"])))
        return
    weighted = any(row.HasField("weighted_up") for _, answer in answers(outcomes) for row in answer["users"])
    columns = COLUMNS + (WEIGHTED if weighted else ()) + (WIDE if wide else ())
    session.report(outcomes, columns, lambda answer: [cells(row, wide, weighted) for row in answer["users"]])


@users.command
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--off", is_flag=True, help="Show only users who are barred by a limit.")
@options
def limits(session: Session, names: tuple[str, ...], off: bool) -> None:
    """Show the limits of users, what they have used, and who is barred."""

    async def ask(node: Node) -> list[pb.LimitState]:
        return [user async for page in node.client.all_limits(names, off) for user in page.users]

    outcomes = session.ask(ask, LISTING)
    weighted = any(user.HasField("weighted_up") for _, users in answers(outcomes) for user in users)
    columns = [column for each in _LIMITS for column in (_BOTH if weighted and each == "used" else (each,))]
    session.report(outcomes, columns, lambda users: [_limits_of(user, weighted) for user in users])


@users.command
@_NAMES
@click.option("--to", "words", metavar="LIMITS", help=f'The limits, for example "{parsing.WORDS}".')
@click.option(
    "--clear",
    is_flag=True,
    help="Remove limits set here; those from the panel and the node's settings apply again.",
)
@options
def limit(session: Session, names: tuple[str, ...], words: str | None, clear: bool) -> None:
    """Set the limits of users. Limits that are not given come from the node's settings; 0 means no limit.

    This replaces the user's earlier limits. If a panel later changes the limits of a user, the panel's apply.
    """
    if clear == (words is not None):
        raise Unusable('give --to "LIMITS" or --clear')
    try:
        limits = parsing.limits(words) if words is not None else None
    except ValueError as error:
        raise Unusable(str(error)) from error
    outcomes = session.ask(lambda node: node.client.set_limits(dict.fromkeys(names, limits)))
    session.report(outcomes, ("name", "note"), lambda reply: [(note.name, note.text) for note in reply.notes])


def _bytes_of(user: pb.ListedUser) -> Iterator[Row]:
    """Rows with the cells of `TRAFFIC`."""
    for each in user.traffic:
        yield user.name, each.tag, amount(each.uplink), amount(each.downlink)


def _limits_of(user: pb.LimitState, weighted: bool = False) -> Row:
    """A row with the cells of `_LIMITS`, or, `weighted`, also that of the bytes as the core counts them."""
    limits, quota = user.limits, user.limits.bytes
    raw = size(_counted(quota, user.used_up, user.used_down)) if quota.bytes else ""
    allowed = f"{len(user.addresses)}/{limits.addresses}" if limits.addresses else ""
    return (
        user.name,
        _state(user),
        size(quota.bytes - user.left) if user.left else size(_used(user)) if quota.bytes else "",
        *([raw] if weighted else []),
        size(quota.bytes) if quota.bytes else "",
        _day(user.resets_at),
        _day(limits.expires_at),
        allowed,
        rate_of_bits(limits.speed.down),
        rate_of_bits(limits.speed.up),
        "; ".join(user.notes),
    )


def _state(user: pb.LimitState) -> str:
    """Whether the user is barred and why, and until when they are barred or slow for abuse."""
    if user.off_for:
        return f"off: {', '.join(user.off_for)}" + (f" until {_day(user.cut_until)}" if user.cut_until else "")
    return f"slow until {_day(user.slow_until)}" if user.slow_until else "on"


def _used(user: pb.LimitState) -> int:
    """Bytes used where none are left: in the direction that counts, with those used on other nodes."""
    weighted = user.HasField("weighted_up")
    used = (user.weighted_up, user.weighted_down) if weighted else (user.used_up, user.used_down)
    return max(user.limits.bytes.bytes, _counted(user.limits.bytes, *used))


def _counted(quota: pb.Quota, up: int, down: int) -> int:
    """The bytes in the direction that counts."""
    return {pb.Quota.UP: up, pb.Quota.DOWN: down}.get(quota.way, up + down)


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M") if seconds else ""


def _given(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options for credentials."""
    given = (
        click.option("--id", "identity", default="", metavar="UUID", help="The id for VLESS and VMess."),
        click.option("--password", default="", help="The password for Trojan and Hysteria."),
        click.option("--shadowsocks", default="", metavar="PASSWORD", help="The password for Shadowsocks."),
        click.option("--flow", default="", metavar="FLOW", help="The flow of VLESS, such as xtls-rprx-vision."),
        click.option(
            "--method", default="", metavar="METHOD", help="The method of Shadowsocks; for 2022, sets the key's length."
        ),
    )
    for option in reversed(given):
        function = option(function)
    return function


@users.command
@_NAMES
@inbound_option(required=True, help="Let the users into this inbound; may be repeated.")
@click.option("--address", multiple=True, help="Give them this address in a WireGuard tunnel, and make a key.")
@_given
@options
def add(
    session: Session, /, names: tuple[str, ...], inbounds: tuple[str, ...], address: tuple[str, ...], **given: str
) -> None:
    """Add users. Credentials that are not given are generated, and printed only this once."""
    if len(names) > 1 and (address or given["identity"] or given["password"] or given["shadowsocks"]):
        raise Unusable("two users cannot share a credential or an address: add them one at a time")
    users, private = [], ""
    for name in dict.fromkeys(names):
        made = pb.User(email=name, inbounds=inbounds, proxies=new_proxies(given["flow"], given["method"]))
        if address:
            tunnel, private = new_tunnel(address)
            made.proxies.wireguard.CopyFrom(tunnel)
        users.append(put(made, **given))

    async def work(node: Node) -> dict[str, Any]:
        there = [row.name for row in (await listed(node, names)).users if row.inbounds or row.unknown]
        if there:
            raise InvalidRequest(f"already on the node: {', '.join(there)}; to change them: nodectl users change")
        return await _applied(node, users, private)

    _report(session, session.ask(work, PATIENCE))


@users.command
@_NAMES
@inbound_option(help="Let the users into this inbound, and into no others but those given; may be repeated.")
@click.option("--renew", is_flag=True, help="Generate new credentials for all protocols but WireGuard.")
@_given
@options
def change(session: Session, /, names: tuple[str, ...], inbounds: tuple[str, ...], renew: bool, **given: str) -> None:
    """Change the inbounds or credentials of users. What is not given stays as it is."""
    if not (inbounds or renew or any(given.values())):
        raise Unusable("nothing to change: give --inbound, --renew or a credential")
    if len(names) > 1 and (given["identity"] or given["password"] or given["shadowsocks"]):
        raise Unusable("two users cannot share a credential: change them one at a time")
    fresh = {name: new_proxies(given["flow"], given["method"]) for name in names} if renew else {}

    async def work(node: Node) -> dict[str, Any]:
        rows = (await listed(node, names, credentials=True)).users
        _require(names, rows)
        if large := [row.name for row in rows if row.shortened]:
            raise InvalidRequest(f"too large to be changed one by one: {', '.join(large)}; use nodectl users sync")
        users = []
        for name, row in ((name, row) for name in names for row in rows if not missing([name], [row])):
            user = pb.User(email=row.name, proxies=row.proxies, inbounds=inbounds or [*row.inbounds, *row.unknown])
            if row.HasField("limits"):
                user.limits.CopyFrom(row.limits)
            if renew:
                user.proxies.MergeFrom(fresh[name])
            users.append(put(user, **given))
        return await _applied(node, users)

    _report(session, session.ask(work, PATIENCE))


@users.command
@_NAMES
@options
def remove(session: Session, names: tuple[str, ...]) -> None:
    """Remove users and close their connections. If the node does not know one of them, none is removed."""

    async def work(node: Node) -> dict[str, Any]:
        rows = (await listed(node, names)).users
        _require(names, rows)
        await send(node, [pb.User(email=row.name) for row in rows])
        out = missing([row.name for row in rows], (await listed(node, names)).users)
        return {"users": [{"name": row.name, "out": row.name in out} for row in rows]}

    outcomes = session.ask(work, PATIENCE)
    session.report(
        outcomes,
        ("removed", "state"),
        _removed,
        Exit.USERS_REFUSED,
        lambda answer: not all(user["out"] for user in answer["users"]),
    )


def put(user: pb.User, identity: str, password: str, shadowsocks: str, flow: str, method: str) -> pb.User:
    """Set the given credentials in the user's message."""
    proxies = user.proxies
    if identity:
        proxies.vless.id = proxies.vmess.id = identity
    if password:
        proxies.trojan.password = proxies.hysteria.auth = password
    if shadowsocks:
        proxies.shadowsocks.password = shadowsocks
    if flow:
        proxies.vless.flow = flow
    if method and method not in KEY_BYTES:
        proxies.shadowsocks.method = method
    return user


async def _applied(node: Node, users: Sequence[pb.User], private: str = "") -> dict[str, Any]:
    """Send the users to the node; the answer for `--json`."""
    refused = await send(node, users)
    made = [{"user": user, "wireguard_private_key": private, "refused": refused.get(user.email, "")} for user in users]
    return {"users": made}


def _require(names: Sequence[str], rows: Sequence[pb.ListedUser]) -> None:
    if absent := missing(names, rows):
        raise UnknownName(f"there is no user {', '.join(map(repr, absent))}")


def _report(session: Session, outcomes: Sequence[Outcome[dict[str, Any]]]) -> NoReturn:
    def refused(answer: dict[str, Any]) -> bool:
        return any(made["refused"] for made in answer["users"])

    session.report(outcomes, ("name", "field", "value"), _made, Exit.USERS_REFUSED, refused)


def _made(answer: dict[str, Any]) -> Iterator[Row]:
    for made in answer["users"]:
        user: pb.User = made["user"]
        yield user.email, "inbounds", ", ".join(user.inbounds)
        for name, proxy in proxies_of(user.proxies).items():
            for field, value in proxy.ListFields():
                yield user.email, f"{name} {field.name}", value if isinstance(value, str) else ", ".join(value)
        if made["wireguard_private_key"]:
            yield user.email, "wireguard private_key", made["wireguard_private_key"]
        yield user.email, "state", f"refused: {made['refused']}" if made["refused"] else "confirmed"


def _removed(answer: dict[str, Any]) -> Iterator[Row]:
    for user in answer["users"]:
        yield user["name"], "out" if user["out"] else "leaving: a core still has them; the node goes on removing"


def new_proxies(flow: str = "", method: str = "", random: Callable[[int], bytes] = secrets.token_bytes) -> pb.Proxy:
    """One id for VLESS and VMess, one password for Trojan and Hysteria, one key for Shadowsocks (2022: no method)."""
    identity = str(uuid.UUID(bytes=random(16), version=4))
    password = base64.urlsafe_b64encode(random(_PASSWORD)).decode()
    key = base64.b64encode(random(KEY_BYTES.get(method, _KEY))).decode()
    return pb.Proxy(
        vless=pb.Vless(id=identity, flow=flow),
        vmess=pb.Vmess(id=identity),
        trojan=pb.Trojan(password=password),
        shadowsocks=pb.Shadowsocks(password=key, method="" if method in KEY_BYTES else method),
        hysteria=pb.Hysteria(auth=password),
    )


def new_tunnel(addresses: Sequence[str]) -> tuple[pb.Wireguard, str]:
    """A new WireGuard public key with these addresses, and its private key, which only the user gets."""
    private = X25519PrivateKey.generate()
    public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    mine = private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    peer = pb.Wireguard(public_key=base64.b64encode(public).decode(), peer_ips=addresses)
    return peer, base64.b64encode(mine).decode()


@users.command
@click.argument("name", required=False, default="")
@click.option("--address", default="", metavar="IP", help="Only connections from this address.")
@click.option("--inbound", default="", metavar="TAG", help="Only connections to this inbound.")
@options
def drop(session: Session, name: str, address: str, inbound: str) -> None:
    """End the connections of a user, from an address or to an inbound. Users may come back at once.

    With several of these, end the connections to which all of them apply.
    """
    if not (name or address or inbound):
        raise click.UsageError("give a NAME, --address or --inbound")
    outcomes = session.ask(lambda node: node.client.drop_connections(name, address, inbound))
    session.report(outcomes, ("ended", "users", "unsupported"), _dropped)


def _dropped(reply: pb.DropConnectionsResponse) -> Iterator[Row]:
    yield reply.ended, reply.users, "; ".join(f"{tag}: {why}" for tag, why in sorted(reply.unsupported.items()))


@click.command
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--addresses", is_flag=True, help="Show the addresses and times of all users, not only how many.")
@options
def online(session: Session, names: tuple[str, ...], addresses: bool) -> None:
    """Show from how many addresses each user is connected; for named users, the addresses and times.

    An address that a reverse proxy reported is marked as forwarded.
    """
    columns = "name", "address", "since", "mark"
    if names:
        session.report(session.ask(lambda node: _addresses(node, names)), columns, _places)
    if addresses:
        session.report(session.ask(_online, LISTING), columns, _places)
    session.report(session.ask(_counts, LISTING), ("name", "addresses"), _rows)


async def _online(node: Node) -> list[pb.StatsOnlineIpListResponse]:
    """The users online, with their addresses; says in which inbounds the core does not report them."""
    users: list[pb.StatsOnlineIpListResponse] = []
    unsupported: dict[str, str] = {}
    async for page in node.client.all_online():
        users += page.users
        unsupported |= page.unsupported
    for tag, why in sorted(unsupported.items()):
        note(f"{node.name}: users of inbound {tag!r} are not listed: {why}")
    return users


async def _addresses(node: Node, names: Sequence[str]) -> list[pb.StatsOnlineIpListResponse]:
    return await parallel([partial(node.client.online_ips, name) for name in names], AT_ONCE)


async def _counts(node: Node) -> list[pb.OnlineStatResponse]:
    """The number of addresses of each connected user."""
    try:
        return [pb.OnlineStatResponse(name=user.name, value=len(user.ips)) for user in await _online(node)]
    except (Unsupported, UnknownPath):
        # The core, or the node of an earlier version, has no list: each user is asked for.
        users = (await listed(node)).users
    found = await parallel([partial(_count, node, user.name) for user in users], AT_ONCE)
    return [count for count in found if count.value]


async def _count(node: Node, name: str) -> pb.OnlineStatResponse:
    try:
        return await node.client.online(name)
    except UnknownName:  # removed meanwhile
        return pb.OnlineStatResponse(name=name)


def _places(users: Sequence[pb.StatsOnlineIpListResponse]) -> Iterator[Row]:
    for user in users:
        for address, since in sorted(user.ips.items()):
            seen = datetime.fromtimestamp(since).astimezone().isoformat(" ")
            yield user.name, address, seen, "forwarded" if address in user.forwarded else ""


def _rows(counts: Sequence[pb.OnlineStatResponse]) -> Iterator[Row]:
    for count in sorted(counts, key=lambda count: (-count.value, count.name)):
        yield count.name, count.value
