"""The client against a real node, over both transports: all operations, all errors, all kinds of broken connections."""

from __future__ import annotations

import inspect
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from node.api.auth import Dialect
from node.api.methods import MAX_BODY, METHODS, Kind, Method
from node.base import errors
from node.base.errors import NodeError
from node.base.logs import NODE_MARK
from node.client import Client, DeadlineExceeded, Target, Unreachable, connect
from node.client.client import CHUNK, chunks
from node.client.rest import RestTransport
from node.client.rpc import RpcTransport
from protos import service_pb2 as pb
from scripts.staging import background, certs
from scripts.staging.backend import backend, user
from scripts.staging.inbounds import Kind as Inbound
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import freeze
from scripts.staging.protocols import vless
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from tests.harness.relay import Relay
from tests.live.test_log_streams import node_with
from tests.node.door.test_tls import chain_of_three

T = TypeVar("T")
Work = Callable[[Client], Coroutine[Any, Any, T]]
Aim = Callable[[NodeProcess], Target]

VLESS = Inbound("vless-raw", vless(), raw())
INFO = next(method for method in METHODS if method.name == "GetBaseInfo")
ALICE = user(TestUser.new("alice"), {"in": VLESS})
MANY = 10_000


def rest(node: NodeProcess) -> Target:
    return Target("rest", node.host, node.rest_port, node.key, node.pem)


def deployed(node: NodeProcess) -> Target:
    return replace(rest(node), dialect=Dialect.DEPLOYED)


def rpc(node: NodeProcess) -> Target:
    return Target("grpc", node.host, node.grpc_port, node.key, node.pem)


each_way = pytest.mark.parametrize("aim", [rest, deployed, rpc])
each_transport = pytest.mark.parametrize("aim", [rest, rpc])


def ask(target: Target, work: Work[T], deadline: float = 30.0) -> T:
    """Call with a new client."""

    async def whole() -> T:
        async with connect(background.reactor, target, deadline=deadline) as client:
            return await work(client)

    return background.run(whole)


def somebody(name: str = "") -> pb.User:
    return user(TestUser.new(name or secrets.token_hex(4)), {"in": VLESS})


def some_backend(*users: pb.User) -> pb.Backend:
    routing = {"balancers": [{"tag": "both", "selector": ["direct"]}]}
    return backend([VLESS.inbound(free_port(), "in")], users or [ALICE], routing=routing)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with a backend, which the tests keep."""
    with NodeProcess(tmp_path_factory.mktemp("running")) as node:
        ask(rpc(node), lambda client: client.start(some_backend()))
        yield node


# Operations

BAD = pb.User(email="bad", inbounds=["in"], proxies=pb.Proxy(vless=pb.Vless(id="no id " * 10)))


async def known(client: Client, email: str) -> bool:
    try:
        await client.online(email)
    except errors.UnknownName:
        return False
    return True


async def lifecycle(client: Client) -> None:
    info = await client.start(some_backend())
    assert (info.running, info.state) == (True, "running")
    assert (await client.info()).core_version == info.core_version
    await client.stop()
    assert (await client.info()).state == "stopped"


async def logs(client: Client) -> None:
    async with client.logs() as stream:
        async for line in stream:
            assert line.startswith(NODE_MARK)
            break


async def events(client: Client) -> None:
    async with client.events(follow=False) as stream:
        kinds = [event.kind async for event in stream]
    assert kinds[:1] == ["node.started"]
    assert "backend.running" in kinds


async def figures(client: Client) -> None:
    assert (await client.system_stats()).mem_total > 0


async def figures_of_the_core(client: Client) -> None:
    assert (await client.backend_stats()).sys > 0


async def traffic(client: Client) -> None:
    rows = (await client.stats(pb.UserStat, "alice", reset=True)).stats
    assert {(row.name, row.type, row.value) for row in rows} == {("alice", "uplink", 0), ("alice", "downlink", 0)}


async def online(client: Client) -> None:
    assert (await client.online("alice")).value == 0


async def online_addresses(client: Client) -> None:
    assert (await client.online_ips("alice")).name == "alice"


async def single_users(client: Client) -> None:
    ann, bob = somebody(), somebody()
    await client.sync_user(ann, bob)
    assert await known(client, ann.email)
    await client.sync_user(pb.User(email=ann.email), pb.User(email=bob.email))
    assert not await known(client, ann.email)


async def all_users(client: Client) -> None:
    ann = somebody()
    await client.sync_users([ALICE, ann])
    assert await known(client, ann.email)
    await client.sync_users([ALICE])
    assert not await known(client, ann.email)


async def users_in_chunks(client: Client) -> None:
    people = [somebody() for _ in range(10)]
    await client.sync_chunked(people, size=200)
    assert await known(client, people[-1].email)
    await client.sync_chunked([pb.User(email=who.email) for who in people])
    assert not await known(client, people[-1].email)


async def listed(client: Client) -> None:
    people = [*(somebody() for _ in range(4)), BAD]
    with pytest.raises(errors.UsersRefused):
        await client.sync_users([ALICE, *people])
    rows = {row.name: row async for page in client.all_users(credentials=True) for row in page.users}
    assert rows.keys() == {who.email for who in [ALICE, *people]}
    assert {name: list(row.confirmed) for name, row in rows.items() if name != "bad"} == {
        name: ["in"] for name in rows if name != "bad"
    }
    assert list(rows["bad"].refused) == ["in: the id is not a UUID"]
    assert rows["alice"].proxies == ALICE.proxies
    first = await client.list_users(limit=2)
    second = await client.list_users(first.next, names=[row.name for row in first.users] + [people[0].email])
    assert (len(first.users), first.total, second.total <= 3) == (2, 6, True)
    assert first.revision == second.revision
    await client.sync_users([ALICE])
    assert [row.name for row in (await client.list_users()).users] == ["alice"]


def unsupported(work: Work[Any]) -> Work[None]:
    async def refused(client: Client) -> None:
        with pytest.raises(errors.Unsupported):
            await work(client)

    return refused


async def rules(client: Client) -> None:
    await client.add_routing_rule('{"domain": ["a.test"], "outboundTag": "block", "ruleTag": "a"}')
    listed = (await client.routing_rules()).rules
    assert [(rule.outbound_tag, rule.rule_tag) for rule in listed] == [("block", "a")]
    assert (await client.test_route(pb.TestRouteRequest(target_domain="a.test"))).outbound_tag == "block"
    await client.remove_routing_rule("a")
    assert not (await client.routing_rules()).rules


async def balancers(client: Client) -> None:
    for target in ("block", ""):
        await client.override_balancer("both", target)
        assert (await client.balancer_info("both")).override_target == target


async def limited(client: Client) -> None:
    """Limits are set, read and removed."""
    assert not (await client.set_limits({"alice": pb.Limits(addresses=3)})).notes
    (row,) = (await client.get_limits(names=["alice"])).users
    assert (row.name, row.limits.addresses) == ("alice", 3)
    await client.set_limits({"alice": None})
    assert not (await client.get_limits()).users


async def dropped(client: Client) -> None:
    """No user is connected; what does not exist is refused."""
    for asked in ({"name": "alice"}, {"address": "127.0.0.2"}, {"inbound": "in"}):
        reply = await client.drop_connections(**asked)
        assert (reply.ended, reply.users, dict(reply.unsupported)) == (0, 0, {})
    for wrong in ({"name": "nobody"}, {"inbound": "nowhere"}):
        with pytest.raises(errors.UnknownName):
            await client.drop_connections(**wrong)
    for bad in ({}, {"address": "a.test"}):
        with pytest.raises(errors.InvalidRequest):
            await client.drop_connections(**bad)


async def listed_online(client: Client) -> None:
    assert [(list(page.users), page.total) async for page in client.all_online()] == [([], 0)]


async def updates(client: Client) -> None:
    """The node refuses to replace programs here; a job reports its result."""
    for refused in (client.update_core(pb.XRAY, "26.9.30"), client.update_node()):
        with pytest.raises(errors.Forbidden, match="UPDATES=on"):
            await refused
    job = await client.update_geo_files({"geoip.dat": "0" * 64})
    while job.state not in ("done", "failed"):
        (job,) = await client.jobs(job.id)
    assert job.state == "failed" and "Connection refused" in job.text
    assert job.id in [each.id for each in await client.jobs()]


async def bill(client: Client) -> None:
    """Since the month began, or since a date."""
    month, year = await client.bill(), await client.bill("2026-01-01")
    assert (month.timezone, month.core) == ("UTC", 0)
    assert month.names and month.since <= month.until <= year.until
    for bad in ("yesterday", "2999-01-01"):
        with pytest.raises(errors.InvalidRequest):
            await client.bill(bad)


WORK: dict[str, Work[None]] = {
    "start": lifecycle,
    "stop": lifecycle,
    "info": lifecycle,
    "logs": logs,
    "system_stats": figures,
    "backend_stats": figures_of_the_core,
    "stats": traffic,
    "online": online,
    "online_ips": online_addresses,
    "latency": unsupported(lambda client: client.latency()),
    "bill": bill,
    "sync_user": single_users,
    "sync_users": all_users,
    "sync_chunked": users_in_chunks,
    "list_users": listed,
    "set_limits": limited,
    "get_limits": limited,
    "drop_connections": dropped,
    "list_online": listed_online,
    "routing_rules": rules,
    "balancer_info": balancers,
    "test_route": rules,
    "add_routing_rule": rules,
    "remove_routing_rule": rules,
    "override_balancer": balancers,
    "events": events,
    "update_core": updates,
    "update_geo_files": updates,
    "update_node": updates,
    "jobs": updates,
}


def test_every_method_is_an_operation() -> None:
    """The client has a coroutine for each row of METHODS except streams, and each is tested here."""
    assert list(WORK) == [method.call for method in METHODS]
    for method in METHODS:
        made = getattr(Client, method.call)
        assert inspect.iscoroutinefunction(made) is (method.kind not in (Kind.LOGS, Kind.EVENTS))


@pytest.mark.slow
@each_way
@pytest.mark.parametrize("name", [name for name, work in WORK.items() if work is not lifecycle])
def test_operations(running: NodeProcess, aim: Aim, name: str) -> None:
    """Every operation works over each transport and in each dialect."""
    ask(aim(running), WORK[name])


@each_transport
def test_lifecycle(node: NodeProcess, aim: Aim) -> None:
    """A backend is started, reported and stopped."""
    ask(aim(node), lifecycle)


@each_transport
def test_many_users_in_chunks(running: NodeProcess, aim: Aim) -> None:
    """A large list is sent in chunks, none of them over the limit, and all users are applied."""
    people = [somebody(f"{number}.{aim.__name__}") for number in range(MANY)]
    parts = list(chunks(people, CHUNK // 10))
    assert len(parts) > 5
    assert max(part.ByteSize() for part in parts) <= CHUNK // 10

    async def whole(client: Client) -> None:
        await client.sync_chunked(people, CHUNK // 10)
        assert [await known(client, people[number].email) for number in (0, MANY // 2, -1)] == [True] * 3
        await client.sync_users([ALICE])
        assert not await known(client, people[-1].email)

    ask(aim(running), whole)


@each_way
def test_refused_users(running: NodeProcess, aim: Aim) -> None:
    """All unusable users are named at once; the others are in force."""
    worse, good = pb.User(email="worse", inbounds=["in"], proxies=BAD.proxies), somebody()

    async def whole(client: Client) -> None:
        for work in (
            client.sync_user(BAD, worse, good),
            client.sync_chunked([BAD, worse, good]),
            client.sync_users([BAD, worse, good, ALICE]),
        ):
            with pytest.raises(errors.UsersRefused, match=r"^failed to update users: 'bad': [^;]+; 'worse': ") as told:
                await work
            assert good.email not in told.value.text
            assert await known(client, good.email)
            await client.sync_users([ALICE])

    ask(aim(running), whole)


# Errors


async def wrong_config(client: Client) -> None:
    await client.start(pb.Backend(config='{"inbounds": 5}'))


async def too_large(client: Client) -> None:
    await client.start(pb.Backend(config="x" * MAX_BODY))


async def chunk_is_missing(client: Client) -> None:
    await client.call("SyncUsersChunked", pb.Empty, pb.UsersChunk(index=1, last=True))


async def no_message(client: Client) -> None:
    """Bytes of another message; as a Backend, its configuration is not UTF-8."""
    await client.call("Start", pb.BaseInfoResponse, pb.Proxy(vless=pb.Vless(id="x" * 300)))


REFUSALS: dict[str, tuple[type[NodeError], Work[Any]]] = {
    "no backend": (errors.NotInitialized, lambda client: client.backend_stats()),
    "nobody to sync": (errors.NotInitialized, lambda client: client.sync_user(ALICE)),
    "configuration": (errors.InvalidConfig, wrong_config),
    "chunks": (errors.InvalidRequest, chunk_is_missing),
    "bytes": (errors.InvalidRequest, no_message),
    "name": (errors.UnknownName, lambda client: client.stats(pb.UserStat, "nobody")),
    "kind of statistics": (errors.InvalidRequest, lambda client: client.stats(99)),  # type: ignore[arg-type]
    "type of core": (errors.Unsupported, lambda client: client.start(pb.Backend(type=pb.WIREGUARD))),
    "size": (errors.TooLarge, too_large),
}


@each_way
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(node: NodeProcess, aim: Aim, name: str) -> None:
    """A refusal is the same class of error over each transport, with code and text."""
    kind, work = REFUSALS[name]
    with pytest.raises(NodeError) as told:
        ask(aim(node), work)
    assert type(told.value) is kind
    assert told.value.code == kind.code
    assert told.value.text


def test_a_core_that_does_not_come_up(tmp_path: Path) -> None:
    """A failed core is not reported as a broken connection, though the status is the same."""
    with NodeProcess(tmp_path, XRAY_EXECUTABLE_PATH="/bin/false") as node:
        for aim in (rest, deployed, rpc):
            with pytest.raises(errors.CoreFailed, match="/bin/false"):
                ask(aim(node), lambda client: client.start(some_backend()))


def test_a_start_that_is_stopped(tmp_path: Path) -> None:
    """Calls of one client are concurrent: a Stop ends the Start in progress."""

    async def whole(client: Client) -> None:
        start = Deferred.fromCoroutine(client.start(some_backend()))
        while (await client.info()).state != "starting":
            await deferLater(background.reactor, 0.01)
        await client.stop()
        with pytest.raises(errors.Aborted):
            await start

    with node_with(tmp_path, "import time; time.sleep(60)") as node:
        for aim in (rest, rpc):
            ask(aim(node), whole)


@each_way
def test_a_wrong_key(node: NodeProcess, aim: Aim) -> None:
    """A wrong key is reported, in a call and in a stream."""
    for work in (lambda client: client.info(), lambda client: client.logs().open()):
        with pytest.raises(errors.Unauthenticated):
            ask(replace(aim(node), key="another-key-of-a-node"), work)


@pytest.mark.parametrize(
    ("aim", "row", "kind"),
    [
        (rest, replace(INFO, path="/nothing"), errors.UnknownPath),
        (deployed, replace(INFO, path="/nothing"), errors.UnknownPath),
        (rest, replace(INFO, verbs=("DELETE",)), errors.WrongVerb),
        (deployed, replace(INFO, verbs=("DELETE",)), errors.WrongVerb),
        (rpc, replace(INFO, name="Nothing"), errors.UnknownPath),
    ],
)
def test_operations_that_are_none(node: NodeProcess, aim: Aim, row: Method, kind: type[NodeError]) -> None:
    """A client that is newer than its node learns that the operation is missing."""

    async def whole() -> None:
        target = aim(node)
        bridge = background.aio()
        transport = (
            RpcTransport(background.reactor, target, bridge, owned=False)
            if target.transport == "grpc"
            else RestTransport(background.reactor, target)
        )
        try:
            await transport.call(row, [pb.Empty()])
        finally:
            await transport.close()

    with pytest.raises(NodeError) as told:
        background.run(whole)
    assert type(told.value) is kind


# Nodes that do not answer


@each_transport
def test_nobody_listens(node: NodeProcess, aim: Aim) -> None:
    """Calls and streams report a port without a listener, and an unknown host name."""

    async def whole(client: Client) -> None:
        for work in (client.info(), client.logs().open()):
            with pytest.raises(Unreachable):
                await work

    for changed in ({"port": free_port()}, {"host": "nobody.invalid"}, {"host": "a..b"}):
        ask(replace(aim(node), **changed), whole)


@contextmanager
def silent() -> Iterator[int]:
    """The port of a server that accepts connections and never replies."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        yield port


@each_transport
def test_deadline_of_a_connection(node: NodeProcess, aim: Aim) -> None:
    """A call ends at its deadline while it still connects, and reports it."""
    with silent() as port:
        for work in (lambda client: client.info(), lambda client: client.logs().open()):
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"0\.3 s"):
                ask(replace(aim(node), port=port), work, deadline=0.3)
            assert 0.3 <= time.monotonic() - began < 3


@each_transport
def test_deadline_of_a_call(node: NodeProcess, aim: Aim) -> None:
    """A call to a node that does not reply ends at its deadline; the client works again once the node does."""

    async def whole(client: Client) -> None:
        hasty = client.within(0.3)
        assert (await client.info()).version
        freeze(node.node_pid)
        try:
            for work in (hasty.info(), hasty.sync_users([ALICE])):
                with pytest.raises(DeadlineExceeded):
                    await work
        finally:
            os.kill(node.node_pid, signal.SIGCONT)
        assert (await client.info()).version

    ask(aim(node), whole)


@each_transport
def test_connection_that_breaks(node: NodeProcess, aim: Aim) -> None:
    """A connection that breaks during a call ends the call at once; the next call opens another."""
    with Relay(aim(node).port) as relay:

        async def whole(client: Client) -> None:
            assert (await client.info()).version
            freeze(node.node_pid)
            try:
                # Not a GET, which REST repeats on another connection.
                call = Deferred.fromCoroutine(client.sync_users([ALICE]))
                await deferLater(background.reactor, 0.2)
                assert not call.called
                relay.drop()
                with pytest.raises(Unreachable):
                    await call
            finally:
                os.kill(node.node_pid, signal.SIGCONT)
            assert (await client.info()).version

        ask(replace(aim(node), port=relay.port), whole)


@each_transport
def test_call_that_is_cancelled(node: NodeProcess, aim: Aim) -> None:
    """A cancelled call leaves nothing open, and the client works on."""

    async def whole(client: Client) -> None:
        freeze(node.node_pid)
        try:
            call = Deferred.fromCoroutine(client.info())
            await deferLater(background.reactor, 0.2)
            call.cancel()
            with pytest.raises(CancelledError):
                await call
        finally:
            os.kill(node.node_pid, signal.SIGCONT)
        assert (await client.info()).version

    ask(aim(node), whole)


def test_node_that_is_started_again(own_node: NodeProcess) -> None:
    """A client outlives its node: it reports its absence, and finds the next one."""

    async def whole() -> None:
        clients = [connect(background.reactor, aim(own_node)) for aim in (rest, rpc)]
        for end in (own_node.stop, own_node.kill):
            for client in clients:
                await back(client)
            await deferToThread(end)
            for client in clients:
                with pytest.raises(Unreachable):
                    await client.info()
            await deferToThread(own_node.start)
        for client in clients:
            await back(client)
            await client.close()

    background.run(whole)


async def back(client: Client) -> None:
    """Wait until the node replies; gRPC reconnects after some 100 ms."""
    for _ in range(100):
        try:
            await client.info()
        except Unreachable:
            await deferLater(background.reactor, 0.05)
        else:
            return
    raise AssertionError("the node is not found again")


# Whom the client believes


@each_transport
def test_files(node: NodeProcess, tmp_path: Path, aim: Aim) -> None:
    """The key and the certificate may be in files."""
    key = tmp_path / "key"
    key.write_text(node.key + "\n")
    target = replace(aim(node), key=key, trust=node.certificate.certificate)
    assert ask(target, lambda client: client.info()).version


@each_transport
def test_another_certificate(node: NodeProcess, tmp_path: Path, aim: Aim) -> None:
    """The client sends no key to a node with another certificate than the pinned one, nor to an untrusted one."""
    other = certs.make(tmp_path, ["localhost", node.host])
    for trust in (other.certificate, None):
        with pytest.raises(Unreachable, match=r"(?i)verif"):
            ask(replace(aim(node), trust=trust), lambda client: client.info())


def test_another_host(tmp_path: Path) -> None:
    """A pinned certificate must be valid for the host, too."""
    pair = certs.make(tmp_path, ["elsewhere.example"])
    with NodeProcess(tmp_path, SSL_CERT_FILE=str(pair.certificate), SSL_KEY_FILE=str(pair.key)) as node:
        for aim in (rest, rpc):
            with pytest.raises(Unreachable):
                ask(replace(aim(node), trust=pair.certificate), lambda client: client.info())


def test_authorities(tmp_path: Path) -> None:
    """The client trusts a node by an authority's certificate, or by the node's own if only that is pinned."""
    root, middle, own, key = chain_of_three()
    files = tmp_path / "chain.pem", tmp_path / "chain.key"
    for file, content in zip(files, (own + middle, key), strict=True):
        file.write_bytes(content)
        file.chmod(0o600)
    with NodeProcess(tmp_path, SSL_CERT_FILE=str(files[0]), SSL_KEY_FILE=str(files[1])) as node:
        for aim, trust in product((rest, rpc), (root, middle, own, own + middle)):
            target = replace(aim(node), certificate_name="localhost", trust=trust.decode())
            assert ask(target, lambda client: client.info()).version


# Many nodes


def test_many_clients_at_once(node: NodeProcess) -> None:
    """Clients run concurrently on one gRPC thread, and each can be closed separately."""

    async def whole() -> None:
        bridge = background.aio()
        targets = [aim(node) for aim in (rest, deployed, rpc) for _ in range(20)]
        clients = [connect(background.reactor, target, aio=bridge) for target in targets]
        calls = [Deferred.fromCoroutine(client.info()) for client in clients]
        assert all([(await call).version for call in calls])
        for client in clients:
            await client.close()

    background.run(whole)
