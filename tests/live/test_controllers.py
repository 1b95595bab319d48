"""What deployed controllers rely on, fact by fact, byte for byte: over both transports, on the real node and core.

`tests.harness.deployed` writes and reads the messages, without any code of the product.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import pytest
from packaging.version import Version

from node.certificate import ensure
from scripts.staging import certs, transfer
from scripts.staging.backend import backend_config
from scripts.staging.controller import RestController
from scripts.staging.core import Json
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import ROOMY
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, gets_in, talking
from tests.harness.deployed import (
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    UNAUTHENTICATED,
    UNAVAILABLE,
    UNIMPLEMENTED,
    Answer,
    GrpcWire,
    RestWire,
    Tail,
    Wire,
    dial,
    number_of,
    pack,
    text_of,
    unpack,
)
from tests.harness.grounds import XRAY
from tests.live.test_live_users import opens_trojan
from tests.live.test_nobody_dropped import Fickle

WIRES: Mapping[str, Callable[[Fickle], RestWire | GrpcWire]] = {"rest": RestWire, "grpc": GrpcWire}
USERS_STAT, OUTBOUNDS = 4, 0
# A rule of every panel's configuration: no traffic to private networks. There is no geo file.
PRIVATE = {"rules": [{"type": "field", "ip": ["geoip:private"], "outboundTag": "block", "inboundTag": ["elsewhere"]}]}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fickle]:
    """A node with its self-made certificate, whose core can fail or hang on a test's request."""
    directory = tmp_path_factory.mktemp("controllers")
    made = ensure(directory / "pair", ["node.test"])
    with Fickle(directory, XRAY, SSL_CERT_FILE=str(made.certificate), SSL_KEY_FILE=str(made.key), **ROOMY) as running:
        running.certificate = certs.Certificate(made.certificate, made.key, made.names)
        yield running


@pytest.fixture(params=list(WIRES))
def wire(node: Fickle, request: pytest.FixtureRequest) -> Iterator[RestWire | GrpcWire]:
    with closing(WIRES[request.param](node)) as one:
        yield one


@pytest.fixture(scope="module")
def home(all_kinds: Mapping[str, Kind]) -> Place:
    """A tag with a space, as panels use them."""
    return Place(all_kinds["vless-raw"], "at home")


@pytest.fixture(scope="module")
def work(all_kinds: Mapping[str, Kind]) -> Place:
    return Place(all_kinds["trojan-tls"], "work")


@pytest.fixture(scope="module")
def keyed(all_kinds: Mapping[str, Kind]) -> Place:
    return Place(all_kinds["shadowsocks-2022-aes-128"], "keyed")


@pytest.fixture
def places(home: Place, work: Place, keyed: Place) -> list[Place]:
    return [home, work, keyed]


@pytest.fixture
def anna() -> TestUser:
    return TestUser.new("42")


@pytest.fixture
def running(wire: Wire, places: list[Place], anna: TestUser) -> Wire:
    """A backend with one user, started as a connecting panel does: Stop, then Start."""
    assert wire.call("Stop").fine
    answer = wire.call("Start", start(places, member(anna, "at home")))
    assert answer.fine, answer
    return wire


def member(person: TestUser, *tags: str, password: str = "", masque: str = "") -> bytes:
    """A user as the newer library sends them: with all seven credentials, most of them empty."""
    flow = {1: person.uuid, 2: ""}
    secrets = {1: b"", 2: pack(flow) if person.uuid else b"", 3: pack({1: password}), 4: pack({1: password, 2: ""})}
    more = {5: b"", 6: b"", 7: pack({1: masque}) if masque else b""}
    return pack({1: person.email, 2: pack({**secrets, **more}), 3: tags})


def start(places: list[Place], *users: bytes, kind: int = 0, config: str = "", more: Mapping[int, bytes] = {}) -> bytes:
    """A Start as panels send it, with a keep-alive, which their form requires."""
    text = config or backend_config([place.inbound for place in places], routing=PRIVATE)
    return pack({1: kind, 2: text, 3: users, 4: 60, **more})


def chunk(index: int, last: bool, *users: bytes) -> bytes:
    return pack({1: users, 2: index, 3: last})


def is_known(wire: Wire, name: str) -> bool:
    answer = wire.call("GetUserOnlineStats", pack({1: name}))
    assert answer.fine or answer.is_error(404, NOT_FOUND), answer
    return answer.fine


def rows(wire: Wire, kind: int, name: str = "") -> dict[tuple[str, str, str], int]:
    """The rows of a reading with reset: bytes by name, link and type."""
    answer = wire.call("GetStats", pack({1: name, 2: True, 3: kind}))
    assert answer.fine, answer
    found = [unpack(row) for row in unpack(answer.body)[1]]
    return {(text_of(row, 1), text_of(row, 3), text_of(row, 2)): number_of(row, 4) for row in found}


def health(wire: Wire) -> Answer:
    return wire.call("GetBackendStats")


@contextmanager
def out_of_order(node: Fickle, what: Callable[[], None]) -> Iterator[None]:
    """Break the core in the way `what` inside the block; repair it at the end."""
    what()
    try:
        yield
    finally:
        node.works()


# 1: log streams


def test_1_log_streams_are_not_refused_and_not_ended(node: Fickle, wire: Wire, places: list[Place]) -> None:
    """A stream opens without a backend, and survives a Start, the core's death and a Stop."""
    wire.call("Stop")
    tail = wire.logs()
    assert wire.call("Start", start(places)).fine
    awaits(tail, b"backend running")
    os.kill(node.newest_core(), signal.SIGKILL)
    awaits(tail, b"backend restarting")
    until(lambda: health(wire).fine, what="the core is back")
    assert wire.call("Stop").fine
    awaits(tail, b"backend stopped")
    assert not tail.done
    tail.abandon()


def test_1_log_streams_have_no_end_when_the_node_ends(node: Fickle) -> None:
    """At shutdown the connection closes without a status: else clients would retry without a pause."""
    with closing(GrpcWire(node)) as wire:
        tail, silent = wire.logs(), RestWire(node).logs()
        node.stop()
        until(lambda: (tail.read(), wire.lost)[1], what="the connection ends")
        assert not tail.done
        until(lambda: (silent.read(), silent.done)[1], what="the other ends")
        silent.abandon()
    node.start()


def awaits(tail: Tail, text: bytes) -> None:
    until(lambda: text in tail.read(), 15, f"a line with {text!r}")


# 2: streams of users


def test_2_a_bad_user_ends_no_stream(node: Fickle, running: Wire, anna: TestUser) -> None:
    """The bad user is skipped and named at the end; later users are applied while the stream is open."""
    bad, good = replace(TestUser.new("43"), uuid="no id, and too long to be hashed to one"), TestUser.new("44")
    if isinstance(running, GrpcWire):
        stream = running.open("SyncUser")
        for person in (bad, good):
            running.send(stream, member(person, "at home"))
        until(lambda: is_known(running, "44"), what="the good one is there")
        assert not stream.over
        answer = running.end(stream)
        assert answer.status == INTERNAL
        assert answer.text.startswith("failed to update users")
        assert "43" in answer.text
    else:
        answer = running.call("SyncUser", member(bad, "at home"))
        assert answer.status == 500
        assert "43" in answer.text
        assert running.call("SyncUser", member(good, "at home")).fine
    assert is_known(running, "44")


# 3: full sync


def test_3_a_full_sync_of_either_library(running: Wire, anna: TestUser) -> None:
    """A full sync replaces all users; over REST the older library sends POST, the newer PUT."""
    verbs = ("PUT", "POST") if isinstance(running, RestWire) else ("",)
    for verb in verbs:
        other = TestUser.new(f"5{len(verb)}")
        body = pack({1: [member(other, "at home")]})
        answer = running.send(verb, "/users/sync", body) if isinstance(running, RestWire) else None
        assert (answer or running.call("SyncUsers", body)).fine
        assert is_known(running, other.email)
        assert not is_known(running, anna.email)


# 4: versions


def test_4_versions_are_there_and_new_enough(running: Wire, places: list[Place]) -> None:
    """Start and info return running, the core's version, and the node's: at least 0.2.0, as the newer library reads it.

    That one cuts off what is behind - or +; between two releases `.devN` is left, which it knows.
    """
    for answer in (running.call("Start", start(places)), running.call("GetBaseInfo")):
        fields = unpack(answer.body)
        assert number_of(fields, 1) == 1
        assert text_of(fields, 2)
        cut = text_of(fields, 3).partition("-")[0].partition("+")[0]
        assert Version(cut) >= Version("0.2.0")


# 5: the certificate


def test_5_the_certificate_fits_a_panel(node: Fickle, wire: Wire) -> None:
    """The self-made certificate has at most 2,048 characters, and is valid on both ports by name."""
    assert len(node.pem) <= 2048
    assert wire.call("GetBaseInfo").fine


# 6: the default configuration


def test_6_private_networks_without_a_geo_file(node: Fickle, running: Wire) -> None:
    """The core runs with every panel's rule on geoip:private."""
    assert not list(node.directory.glob("*.dat"))
    assert health(running).fine


# 7: empty is absent


def test_7_an_empty_credential_opens_nothing(running: Wire, anna: TestUser, work: Place, echo: EchoServer) -> None:
    """With all credentials present, an empty one is no credential: not even the empty password works."""
    assert running.call("SyncUser", member(anna, "at home", "work", password="open sesame")).fine
    until(lambda: opens_trojan(work, "open sesame", echo), what="the password opens it")
    assert running.call("SyncUser", member(anna, "at home", "work")).fine
    assert is_known(running, anna.email)
    assert not opens_trojan(work, "", echo)
    assert not opens_trojan(work, "open sesame", echo)


# 8: Stop and Start


def test_8_stop_and_start_lose_nothing(
    node: Fickle, running: Wire, places: list[Place], home: Place, anna: TestUser, echo: EchoServer
) -> None:
    """Connections stay, the core is the same, and its earlier counts can still be billed."""
    rows(running, USERS_STAT)
    core = node.newest_core()
    with connection(home, anna, echo) as link:
        transfer.download(link, 100_000)
        with talking(link):
            assert running.call("Stop").fine
            assert health(running).text == "backend not initialized"
            assert running.call("Start", start(places, member(anna, "at home"))).fine
    assert node.newest_core() == core
    until(lambda: rows(running, USERS_STAT).get(("42", "traffic", "downlink"), 0) >= 100_000, what="the bytes")


# 9: names and tags


def test_9_tags_in_any_order_and_of_others(
    running: Wire, home: Place, keyed: Place, anna: TestUser, echo: EchoServer
) -> None:
    """Tags are a set: order, other cores' tags and spaces do not matter; none of this node's tags is a removal."""
    tags = ("nowhere", keyed.tag, "of another core", home.tag)
    assert running.call("SyncUser", member(anna, *tags, password="secret")).fine
    with connection(home, anna, echo) as link, talking(link):
        assert running.call("SyncUser", member(anna, *reversed(tags), password="secret")).fine
    assert is_known(running, "42")
    assert running.call("SyncUser", member(anna, "nowhere", "of another core")).fine
    assert not is_known(running, "42")
    assert not gets_in(home, anna, echo, timeout=2)


# 10: health


def test_10_health_without_a_backend(wire: Wire) -> None:
    """The text by which a panel knows that it must start a backend."""
    wire.call("Stop")
    answer = health(wire)
    assert answer.is_error(500, UNAVAILABLE)
    assert answer.text == "backend not initialized"


def test_10_health_while_the_core_comes_back(node: Fickle, running: Wire) -> None:
    """The text that makes a panel wait for a restart; calls during it do not block."""
    with out_of_order(node, node.fails):
        os.kill(node.newest_core(), signal.SIGKILL)
        until(lambda: not health(running).fine, what="the core is gone")
        before = time.monotonic()
        answer = health(running)
        assert time.monotonic() - before < 5
        assert answer.is_error(503, UNAVAILABLE)
        assert "core is not started yet" in answer.text
    until(lambda: health(running).fine, 15, "the core is back")


# 11: billing


def test_11_polls_are_billed(running: Wire, home: Place, anna: TestUser, echo: EchoServer) -> None:
    """Rows of users and of outbounds have their name, link and type; a reset returns each byte once."""
    rows(running, USERS_STAT), rows(running, OUTBOUNDS)
    with connection(home, anna, echo) as link:
        transfer.download(link, 300_000)
    for kind, name in ((USERS_STAT, "42"), (OUTBOUNDS, "direct")):
        taken = polled(running, kind, (name, "traffic", "downlink"))
        assert 300_000 <= taken[name, "traffic", "downlink"] < 310_000
        assert {(link, way) for _, link, way in taken} == {("traffic", "uplink"), ("traffic", "downlink")}


def polled(wire: Wire, kind: int, row: tuple[str, str, str]) -> Counter[tuple[str, str, str]]:
    """The sum of polls until this row is present and nothing more arrives."""
    taken = Counter[tuple[str, str, str]]()

    def rests() -> bool:
        latest = rows(wire, kind)
        taken.update(latest)
        return bool(taken[row]) and not any(latest.values())

    until(rests, what=f"all of {row} is there")
    return taken


# 12: batches


def test_12_batches_of_users(running: Wire, anna: TestUser) -> None:
    """One user is one chunk, many are hundreds in order; users in no chunk stay."""
    one, many = TestUser.new("60"), [TestUser.new(str(number)) for number in range(100, 350)]
    assert running.call("SyncUsersChunked", chunk(0, True, member(one, "at home"))).fine
    batches = [[member(person, "at home") for person in many[first : first + 100]] for first in (0, 100, 200)]
    assert running.call("SyncUsersChunked", *(chunk(at, at == 2, *batch) for at, batch in enumerate(batches))).fine
    assert all(is_known(running, name) for name in ("42", "60", "100", "349"))


def test_12_a_refused_batch_is_known_as_such(running: Wire) -> None:
    """INTERNAL or 500, with the text on which controllers halve a batch, names the bad user; others are applied."""
    bad = replace(TestUser.new("71"), uuid="no id, and too long to be hashed to one")
    answer = running.call(
        "SyncUsersChunked", chunk(0, True, *(member(x, "at home") for x in (bad, TestUser.new("72"))))
    )
    assert answer.is_error(500, INTERNAL)
    assert answer.text.startswith("failed to update users")
    assert "71" in answer.text
    assert "72" not in answer.text
    assert is_known(running, "72")


def test_12_chunks_that_do_not_follow(running: Wire) -> None:
    """A missing chunk is invalid data, not a bad user."""
    answer = running.call("SyncUsersChunked", chunk(1, True, member(TestUser.new("73"), "at home")))
    assert answer.is_error(400, INVALID_ARGUMENT)
    assert not is_known(running, "73")


# 13: keys of Shadowsocks-2022


def test_13_the_key_in_a_link(running: Wire, keyed: Place, anna: TestUser, echo: EchoServer) -> None:
    """The client uses the key that the panel derives from the password, or the password if it is a key."""
    for password in (anna.password, base64.b64encode(os.urandom(16)).decode()):
        person = replace(anna, password=password)
        assert running.call("SyncUser", member(person, "keyed", password=password)).fine
        assert gets_in(keyed, person, echo)


# 14: refusals


def test_14_a_refused_start_says_why_at_its_head(running: Wire, places: list[Place]) -> None:
    """The first 1,020 characters, which operators see, contain the core's reason for any length of configuration."""
    config: Json = json.loads(backend_config([place.inbound for place in places]))
    config["inbounds"][0]["protocol"] = "nonsense"
    config["remarks"] = "x" * 10_000
    answer = running.call("Start", start(places, config=json.dumps(config)))
    assert answer.is_error(400, INVALID_ARGUMENT)
    assert "nonsense" in answer.text[:1020]
    assert health(running).fine


def test_14_strangers_are_refused(wire: Wire) -> None:
    """A wrong key is reported as such, in plain text, also for a stream."""
    for name in ("GetBaseInfo", "GetLogs"):
        answer = wire.call(name, key=str(uuid.uuid4()))
        assert answer.is_error(401, UNAUTHENTICATED)
        assert "key" in answer.text


# 15: how streams are left


def test_15_streams_that_are_abandoned(node: Fickle, running: Wire) -> None:
    """They end without a status, as clients leave them; the connection stays, and nothing is logged as an error."""
    seen = len(node.lines)
    for _ in range(3):
        running.logs().abandon()
        if isinstance(running, GrpcWire):
            stream = running.open("SyncUser")
            running.send(stream, member(TestUser.new("80"), "at home"))
            until(lambda: is_known(running, "80"), what="the user is there")
            running.abandon(stream)
        assert running.call("GetBaseInfo").fine
    assert not [line for line in node.lines[seen:] if "#error" in line or "Traceback" in line]


def test_15_open_streams_at_a_stop_and_a_start(running: Wire, places: list[Place]) -> None:
    """The older library keeps both streams open during Stop and Start; they work on."""
    with ExitStack() as stack:
        tail = running.logs()
        stack.callback(tail.abandon)
        feed = running.open("SyncUser") if isinstance(running, GrpcWire) else None
        assert running.call("Stop").fine
        assert running.call("Start", start(places)).fine
        person = member(TestUser.new("81"), "at home")
        if isinstance(running, GrpcWire) and feed is not None:
            running.send(feed, person)
            until(lambda: is_known(running, "81"), what="the user is there")
            assert not feed.over
            running.abandon(feed)
        else:
            assert running.call("SyncUser", person).fine
        awaits(tail, b"backend running")
        assert not tail.done


# 16: what is agreed on before the first byte


@pytest.mark.parametrize(
    ("offered", "rest", "grpc"), [(("h2", "http/1.1"), "http/1.1", "h2"), (("x",), None, None)], ids=["both", "neither"]
)
def test_16_protocols(node: Fickle, offered: tuple[str, ...], rest: str | None, grpc: str | None) -> None:
    """REST never chooses h2 if it has a choice; the handshake succeeds also without a common protocol.

    All other tests here offer only h2 and send HTTP/1.1.
    """
    for port, picked in ((node.rest_port, rest), (node.grpc_port, grpc)):
        with dial(node, port, *offered) as link:
            assert link.selected_alpn_protocol() == picked
    with dial(node, node.rest_port, *offered) as link:
        link.sendall(b"GET /info HTTP/1.1\r\nHost: localhost\r\nx-api-key: %s\r\n\r\n" % node.key.encode())
        assert link.recv(65_536).startswith(b"HTTP/1.1 200 ")


# 17: all outbounds


def test_17_no_body_asks_for_all_outbounds(running: Wire) -> None:
    """With a length of zero, or without one, the reply has all outbounds, and nothing is reset."""
    answers = [running.send("GET", "/stats", body) for body in (b"", None)] if isinstance(running, RestWire) else []
    for answer in [*answers, running.call("GetStats", b"")]:
        found = [unpack(row) for row in unpack(answer.body)[1]]
        assert {(text_of(row, 1), text_of(row, 2)) for row in found} >= {("direct", "uplink"), ("direct", "downlink")}


# Future contracts, and other meanings of the same numbers


@pytest.mark.parametrize(("kind", "named"), [(1, "WIREGUARD (1)"), (2, "2"), (4, "4"), (5, "5"), (99, "99")])
def test_a_type_of_another_numbering(running: Wire, places: list[Place], kind: int, named: str) -> None:
    """An unknown type is refused by number, with the known ones; the running backend stays."""
    answer = running.call("Start", start(places, kind=kind))
    assert answer.is_error(501, UNIMPLEMENTED)
    assert f"no core of type {named};" in answer.text
    assert "XRAY (0)" in answer.text
    assert health(running).fine


def test_masque_is_named(running: Wire, places: list[Place], anna: TestUser) -> None:
    """A user with only masque, and an inbound for it, are refused by that name; masque beside others is ignored."""
    nobody = replace(anna, email="90", uuid="")
    answer = running.call("SyncUsersChunked", chunk(0, True, member(nobody, "at home", masque="secret")))
    assert answer.is_error(500, INTERNAL)
    assert "90" in answer.text
    assert "masque" in answer.text
    assert "secret" not in answer.text
    assert running.call("SyncUser", member(TestUser.new("91"), "at home", masque="secret")).fine
    config: Json = json.loads(backend_config([place.inbound for place in places]))
    config["inbounds"][0]["protocol"] = "masque"
    answer = running.call("Start", start(places, config=json.dumps(config)))
    assert answer.is_error(400, INVALID_ARGUMENT)
    assert "masque" in answer.text


def test_a_coming_contract_is_passed_over(node: Fickle, running: Wire, places: list[Place], anna: TestUser) -> None:
    """Unknown fields change nothing: the same Start with them is still the same."""
    core = node.newest_core()
    person = member(anna, "at home") + pack({4: b"new"})
    assert running.call("Start", start(places, person, more={6: b"new"})).fine
    assert node.newest_core() == core
    assert running.call("SyncUsers", pack({1: [person], 2: b"new"})).fine
    assert running.call("SyncUsersChunked", chunk(0, True, person) + pack({4: b"new"})).fine
    assert is_known(running, anna.email)


def test_a_slow_start_is_found(node: Fickle, wire: Wire, places: list[Place], anna: TestUser) -> None:
    """A panel that timed out finds the result of its Start by GetBaseInfo; repeating it is quick."""
    # Not in the wire's dialect: its Stop would keep the core for the next Start.
    RestController(node).stop()
    until(lambda: not node.core_pids(), what="no core is left")
    message = start(places, member(anna, "at home"))
    with out_of_order(node, node.waits):
        for _ in range(2):
            give_up(node, wire, message)
        fields = unpack(wire.call("GetBaseInfo").body)
        assert (number_of(fields, 1), text_of(fields, 16)) == (0, "starting")
    until(lambda: number_of(unpack(wire.call("GetBaseInfo").body), 1), 20, "it runs")
    fields = unpack(wire.call("GetBaseInfo").body)
    assert text_of(fields, 2)
    assert text_of(fields, 3)
    core = node.newest_core()
    before = time.monotonic()
    answer = wire.call("Start", message)
    assert time.monotonic() - before < 5
    assert number_of(unpack(answer.body), 1) == 1
    assert node.core_pids() == [core]


def give_up(node: Fickle, wire: Wire, message: bytes) -> None:
    """Send a Start and disconnect before its reply, as this transport's clients do at their timeout."""
    if isinstance(wire, GrpcWire):
        stream = wire.open("Start")
        wire.send(stream, message)
        wire.half_close(stream)
        until(lambda: text_of(unpack(wire.call("GetBaseInfo").body), 16) == "starting", what="it begins")
        wire.abandon(stream)
        return
    head = f"POST /start HTTP/1.1\r\nHost: localhost\r\nx-api-key: {node.key}\r\nContent-Length: {len(message)}\r\n\r\n"
    with dial(node, node.rest_port, "h2") as link:
        link.sendall(head.encode() + message)
        until(lambda: text_of(unpack(wire.call("GetBaseInfo").body), 16) == "starting", what="it begins")
