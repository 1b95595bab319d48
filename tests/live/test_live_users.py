"""Adding, changing and removing users while the core runs: at once, and without effect on other users."""

from __future__ import annotations

import hashlib
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

from protos import service_pb2
from protos.service_pb2 import User, UserStat
from scripts.staging import transfer
from scripts.staging.acceptor import Acceptor
from scripts.staging.backend import backend, chunks
from scripts.staging.controller import Controller, ControllerError, RpcController
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import NAMES, SERVER_NAME, Kind, with_users
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import (
    Place,
    connection,
    control,
    daily,
    gets_in,
    live,
    member,
    over,
    run,
    settled,
    stays_out,
    talking,
)
from tests.harness.grounds import Ground

ANNA, BERT = TestUser.new("anna@test"), TestUser.new("bert@test")
SHADOWSOCKS_2022 = ("shadowsocks-2022-aes-128", "shadowsocks-2022-aes-256")

Sync = Callable[[Controller, list[User]], None]


def one_by_one(controller: Controller, users: list[User]) -> None:
    controller.sync_user(*users)


def chunked(controller: Controller, users: list[User]) -> None:
    controller.sync_chunked(chunks(users, size=1))


def the_set(controller: Controller, users: list[User]) -> None:
    """The complete list: Anna is in it in these tests. Users without inbounds are left out."""
    controller.sync_users([user for user in users if user.inbounds])


@pytest.fixture
def work(all_kinds: Mapping[str, Kind], ground: Ground) -> Place:
    return Place(all_kinds["trojan-tls"], "at work", ground=ground)


def with_new_credentials(person: TestUser) -> TestUser:
    return TestUser.new(person.email)


def refused(call: Callable[[], object]) -> str:
    """The error of a sync with unusable users."""
    with pytest.raises(ControllerError) as error:
        call()
    assert error.value.status in ("500", "INTERNAL")
    assert "failed to update users" in error.value.text
    if error.value.status == "INTERNAL":
        assert error.value.text.startswith("failed to update users")
    return error.value.text


def opens_trojan(place: Place, password: str, echo: EchoServer) -> bool:
    """Whether the password opens a Trojan inbound, with raw bytes: Xray's client refuses an empty password."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    target = b"\1\1" + socket.inet_aton(echo.host) + echo.port.to_bytes(2)
    secret = hashlib.sha224(password.encode()).hexdigest().encode()
    with (
        socket.create_connection(("127.0.0.1", place.port), timeout=0.5) as raw,
        context.wrap_socket(raw, server_hostname=SERVER_NAME) as link,
    ):
        link.sendall(secret + b"\r\n" + target + b"\r\n" + b"echo 5\nhello")
        try:
            return link.recv(5) == b"hello"
        except OSError:
            return False


# The traffic of every kind, and strangers at it, are tried in test_traffic.
@pytest.mark.parametrize("name", daily(NAMES[::2], NAMES))
@over("grpc")
def test_life_of_a_user(
    name: str, all_kinds: Mapping[str, Kind], cover: CoverServer, echo: EchoServer, controller: Controller
) -> None:
    """On every kind of inbound: an added user can connect at once, a changed one only with the new credential."""
    place, changed = Place(all_kinds[name], name), with_new_credentials(BERT)
    with settled([place], cover):
        run(controller, [place], [member(ANNA, place)])
    assert stays_out(place, BERT, echo)
    controller.sync_user(member(BERT, place))
    assert gets_in(place, BERT, echo)
    controller.sync_user(member(changed, place))
    assert gets_in(place, changed, echo)
    assert stays_out(place, BERT, echo)
    controller.sync_user(member(BERT))
    assert stays_out(place, changed, echo)
    assert gets_in(place, ANNA, echo)


@pytest.mark.parametrize("sync", [one_by_one, chunked, the_set])
def test_every_sync_adds_and_removes(sync: Sync, controller: Controller, home: Place, echo: EchoServer) -> None:
    """Over both transports each kind of sync adds a user and removes one, while others stay."""
    run(controller, [home], [member(ANNA, home)])
    sync(controller, [member(ANNA, home), member(BERT, home)])
    assert gets_in(home, BERT, echo)
    sync(controller, [member(ANNA, home), member(BERT)])
    assert stays_out(home, BERT, echo)
    assert gets_in(home, ANNA, echo)


@live
@pytest.mark.both
def test_nobody_else_notices(controller: Controller, home: Place, work: Place, echo: EchoServer) -> None:
    """Another user's connection carries on while a thousand users of one sync are added, changed and removed."""
    people = [TestUser.new(f"{number}@test") for number in range(1000)]
    run(controller, [home, work], [member(ANNA, home), *(member(person, home, work) for person in people)])
    changed = [with_new_credentials(person) for person in people[:10]] + people[10:]
    with connection(home, ANNA, echo) as link, talking(link):
        controller.sync_user(member(BERT, home), member(people[20]))
        controller.sync_users([member(ANNA, home), *(member(person, home, work) for person in changed)])
        assert all(gets_in(home, person, echo) for person in (changed[0], changed[500]))
        assert stays_out(home, people[0], echo)
        assert stays_out(home, BERT, echo)


@pytest.mark.parametrize("name", SHADOWSOCKS_2022)
@over("rest")
def test_shadowsocks_2022_changes(
    name: str, all_kinds: Mapping[str, Kind], echo: EchoServer, controller: Controller
) -> None:
    """A removal or change does not disturb others: open connections live, new ones connect at once."""
    place, changed = Place(all_kinds[name], name), with_new_credentials(BERT)
    run(controller, [place], [member(ANNA, place), member(BERT, place)])
    with connection(place, ANNA, echo) as link, talking(link):
        for step in (member(changed, place), member(BERT), member(BERT, place), member(BERT)):
            controller.sync_user(step)
            assert gets_in(place, ANNA, echo)
        assert stays_out(place, BERT, echo)


@contextmanager
def stalling(place: Place, first: int) -> Iterator[tuple[Place, threading.Event, threading.Event]]:
    """A relay to the inbound that delays a client's bytes after the `first` ones.

    The first event is set when these are through, the second lets the others follow.
    """
    through, go_on = threading.Event(), threading.Event()

    def serve(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", place.port)) as inbound:
            inbound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = client.recv(64 * 1024)
            inbound.sendall(hello[:first])
            through.set()
            go_on.wait(10)
            inbound.sendall(hello[first:])
            inbound.settimeout(1)
            client.sendall(inbound.recv(64 * 1024))

    with Acceptor("127.0.0.1", port := free_port(), serve):
        yield replace(place, port=port), through, go_on


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.each_once("beside")
@over("rest")
def test_removal_inside_a_handshake(
    beside: bool, all_kinds: Mapping[str, Kind], echo: EchoServer, controller: Controller
) -> None:
    """A Shadowsocks-2022 user who is removed during their handshake is not taken for another user."""
    place = Place(all_kinds["shadowsocks-2022-aes-128"], "stalled")
    controller.stop()
    if beside:
        run(controller, [place], exclude=[place.tag])
    run(controller, [place], [member(ANNA, place), member(BERT, place)])
    controller.stats(UserStat, BERT.email, reset=True)

    def attempt(slow: Place) -> None:
        with suppress(OSError), connection(slow, ANNA, echo):
            pass

    with stalling(place, 16 + 16 + 27) as (slow, through, go_on), ThreadPoolExecutor(1) as pool:
        attempted = pool.submit(attempt, slow)
        assert through.wait(5)
        controller.sync_user(member(ANNA))
        go_on.set()
        attempted.result()
    assert controller.info().running
    assert not any(stat.value for stat in controller.stats(UserStat, BERT.email).stats)
    assert gets_in(place, BERT, echo)
    assert stays_out(place, ANNA, echo)


@over("grpc")
def test_stream_is_applied_as_it_comes(controller: Controller, home: Place, echo: EchoServer) -> None:
    """Each message of an open SyncUser stream takes effect on arrival, not at the end of the stream."""
    assert isinstance(controller, RpcController)
    run(controller, [home])
    messages: queue.SimpleQueue[User | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(controller.rpc.SyncUser, iter(messages.get, None))
        try:
            for person in (ANNA, BERT):
                messages.put(member(person, home))
                until(lambda who=person: gets_in(home, who, echo, 1), 15, "he gets in")  # type: ignore[misc]
            messages.put(member(ANNA))
            until(lambda: stays_out(home, ANNA, echo), 15, "she is removed")
            assert not call.done()
        finally:
            messages.put(None)
    assert call.result() == service_pb2.Empty()


def test_empty_credential_is_none(controller: Controller, home: Place, work: Place, echo: EchoServer) -> None:
    """An empty credential opens nothing; the user's others do, and neither Start nor sync objects."""
    anna, bert = (User(email=p.email, inbounds=[home.tag, work.tag], proxies=home.kind.proxy(p)) for p in (ANNA, BERT))
    for user in (anna, bert):
        user.proxies.trojan.password = ""
    run(controller, [home, work], [anna])
    controller.sync_user(bert)
    assert gets_in(home, ANNA, echo)
    assert gets_in(home, BERT, echo)
    assert not opens_trojan(work, "", echo)
    controller.sync_user(member(ANNA, work))
    assert opens_trojan(work, ANNA.password, echo)


@over("rest")
def test_empty_set(controller: Controller, home: Place, work: Place, echo: EchoServer) -> None:
    """A full sync without users leaves none, and an inbound without users admits none."""
    run(controller, [home, work], [member(ANNA, home, work)])
    controller.sync_users([])
    assert stays_out(home, ANNA, echo)
    assert not opens_trojan(work, "", echo)


def test_unknown_tags(controller: Controller, home: Place, echo: EchoServer) -> None:
    """Tags of other nodes are ignored; a user with only such tags is removed."""
    elsewhere = Place(home.kind, "in another country")
    run(controller, [home], [member(ANNA, elsewhere, home), member(BERT, elsewhere)])
    assert gets_in(home, ANNA, echo)
    assert stays_out(home, BERT, echo)
    controller.sync_user(member(ANNA, elsewhere))
    assert stays_out(home, ANNA, echo)


def test_excluded_inbounds(controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """An excluded inbound has its own users and no others; a managed one has the supplied users and no others."""
    own, managed = (Place(all_kinds["vless-raw"], tag) for tag in ("own", "managed"))
    resident = TestUser.new("resident@test")
    inbounds = [with_users(place.inbound, [place.kind.account(resident)]) for place in (own, managed)]
    controller.start(backend(inbounds, [member(ANNA, own, managed)], exclude=["own"]))
    controller.sync_user(member(BERT, own, managed))
    assert gets_in(own, resident, echo)
    assert stays_out(managed, resident, echo)
    for person in (ANNA, BERT):
        assert gets_in(managed, person, echo)
        assert stays_out(own, person, echo)


def test_unusable_users_at_start(controller: Controller, home: Place, echo: EchoServer) -> None:
    """A Start succeeds despite unusable users: the others are admitted, and the log names the unusable ones."""
    malformed = User(email="malformed@test", inbounds=[home.tag])
    malformed.proxies.vless.id = "this is certainly not a UUID of any kind"
    twin, shouting = replace(ANNA, email="twin@test"), TestUser.new("BERT@test")
    with controller.logs() as logs:
        info = run(
            controller,
            [home],
            [member(ANNA, home), malformed, member(twin, home), member(BERT, home), member(shouting, home)],
        )
        assert info.running
        for name in ("malformed@test", "twin@test", "BERT@test"):
            logs.find(name)
    assert gets_in(home, ANNA, echo)
    assert gets_in(home, BERT, echo)
    assert stays_out(home, shouting, echo)


@pytest.mark.parametrize("sync", [one_by_one, chunked, the_set])
def test_bad_users_in_a_sync(sync: Sync, controller: Controller, home: Place, echo: EchoServer) -> None:
    """A sync applies all usable users, and then names the others."""
    run(controller, [home], [member(ANNA, home)])
    malformed = User(email="malformed@test", inbounds=[home.tag])
    malformed.proxies.vless.id = "this is certainly not a UUID of any kind"
    text = refused(lambda: sync(controller, [member(ANNA, home), member(BERT, home), malformed]))
    assert "malformed@test" in text
    assert BERT.email not in text
    assert gets_in(home, ANNA, echo)
    assert gets_in(home, BERT, echo)


def test_case_of_names(controller: Controller, home: Place, echo: EchoServer) -> None:
    """E-mails that differ in case are one user: changed, queried and removed under any spelling."""
    shouting = TestUser.new(ANNA.email.upper())
    run(controller, [home], [member(ANNA, home)])
    controller.sync_user(member(shouting, home))
    assert gets_in(home, shouting, echo)
    assert stays_out(home, ANNA, echo)
    assert controller.stats(UserStat, ANNA.email).stats == controller.stats(UserStat, shouting.email).stats
    controller.sync_user(member(ANNA))
    assert stays_out(home, shouting, echo)


@over("rest")
def test_two_spellings_in_one_set(controller: Controller, home: Place, echo: EchoServer) -> None:
    """Of two spellings of one e-mail in one set the first is applied, the other is named."""
    shouting = TestUser.new(ANNA.email.upper())
    run(controller, [home])
    assert shouting.email in refused(lambda: controller.sync_users([member(ANNA, home), member(shouting, home)]))
    assert gets_in(home, ANNA, echo)
    assert stays_out(home, shouting, echo)


@pytest.mark.parametrize("sync", [one_by_one, chunked, the_set])
@pytest.mark.parametrize("name", ["vless-raw", "trojan-tls", "shadowsocks-chacha20", "shadowsocks-2022-aes-128"])
@pytest.mark.each_once("name", "sync")
@over("grpc")
def test_credential_moves(
    name: str, sync: Sync, all_kinds: Mapping[str, Kind], echo: EchoServer, controller: Controller
) -> None:
    """A credential that one sync moves to another user admits and bills the other user from then on."""
    place = Place(all_kinds[name], name)
    anna_now, bert_now = with_new_credentials(ANNA), replace(ANNA, email=BERT.email)
    run(controller, [place], [member(ANNA, place), member(BERT, place)])
    sync(controller, [member(anna_now, place), member(bert_now, place)])
    assert stays_out(place, BERT, echo)
    assert gets_in(place, anna_now, echo)
    controller.stats(UserStat, ANNA.email, reset=True)
    before = sum(stat.value for stat in controller.stats(UserStat, BERT.email).stats)
    with connection(place, bert_now, echo) as link:
        transfer.download(link, 10_000)
        assert sum(stat.value for stat in controller.stats(UserStat, BERT.email).stats) >= before + 10_000
    assert not any(stat.value for stat in controller.stats(UserStat, ANNA.email).stats)


@pytest.mark.parametrize("sync", [chunked, the_set])
def test_credential_moves_in_any_order(sync: Sync, controller: Controller, home: Place, echo: EchoServer) -> None:
    """Two users exchange their credentials in one sync, and neither is refused."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    anna_now, bert_now = replace(BERT, email=ANNA.email), replace(ANNA, email=BERT.email)
    sync(controller, [member(bert_now, home), member(anna_now, home)])
    with connection(home, anna_now, echo):
        until(lambda: controller.online(ANNA.email).value == 1, what="she is online")
        assert controller.online(BERT.email).value == 0
    with connection(home, bert_now, echo):
        until(lambda: controller.online(BERT.email).value == 1, what="he is online")


def test_credential_taken(controller: Controller, home: Place, echo: EchoServer) -> None:
    """A user with another's credential is refused by name, and the holder keeps it until removed."""
    thief = replace(ANNA, email="thief@test")
    run(controller, [home], [member(ANNA, home)])
    assert thief.email in refused(lambda: controller.sync_user(member(thief, home)))
    controller.sync_user(member(BERT, home))
    assert gets_in(home, ANNA, echo)
    controller.sync_users([member(BERT, home), member(thief, home)])
    assert gets_in(home, thief, echo)


def test_user_of_many_inbounds(
    all_kinds: Mapping[str, Kind], cover: CoverServer, echo: EchoServer, controller: Controller
) -> None:
    """A user can be in many inbounds of many protocols, with one name and one sum of traffic."""
    # A User has one flow and one Shadowsocks method; Vision's flow is dropped where it is unsupported.
    names = ("vmess-raw", "trojan-tls", "shadowsocks-aes-256-gcm", "shadowsocks-2022-aes-128", "vless-reality-vision")
    places = [Place(all_kinds[name], name) for name in names]
    with settled(places, cover):
        run(controller, places)
    controller.sync_user(member(ANNA, *places))
    with ExitStack() as stack:
        for place in places:
            transfer.download(stack.enter_context(connection(place, ANNA, echo)), 1000)
        assert controller.online(ANNA.email).value == 1
    controller.sync_user(member(ANNA))
    assert not any(gets_in(place, ANNA, echo, timeout=0.5) for place in places)


@live
def test_inbounds_of_a_user_change(controller: Controller, home: Place, work: Place, echo: EchoServer) -> None:
    """A user can connect to exactly their inbounds, and their connection to an inbound that they keep lives on."""
    run(controller, [home, work], [member(ANNA, home)])
    with connection(home, ANNA, echo) as link, talking(link):
        controller.sync_user(member(ANNA, home, work))
        assert gets_in(work, ANNA, echo)
    controller.sync_user(member(ANNA, work))
    assert stays_out(home, ANNA, echo)
    assert gets_in(work, ANNA, echo)


@over("grpc")
def test_vision_where_it_does_not_fit(all_kinds: Mapping[str, Kind], echo: EchoServer, controller: Controller) -> None:
    """A user with Vision's flow can use VLESS inbounds that do not support it, without it."""
    place = Place(all_kinds["vless-ws-tls"], "websocket")
    anna = member(ANNA, place)
    anna.proxies.vless.flow = "xtls-rprx-vision"
    run(controller, [place], [anna])
    assert gets_in(place, ANNA, echo)


@pytest.mark.slow
def test_many_controllers(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """Changes of one controller apply for the other; they can work concurrently."""
    with control(node, "rest") as rest, control(node, "grpc") as grpc, ThreadPoolExecutor(2) as pool:
        run(rest, [home])
        people = [TestUser.new(f"{number}@test") for number in range(20)]
        work: Iterable[tuple[Controller, list[TestUser]]] = ((rest, people[::2]), (grpc, people[1::2]))
        for done in [pool.submit(c.sync_user, *(member(p, home) for p in group)) for c, group in work]:
            done.result()
        assert all(gets_in(home, person, echo) for person in people)
