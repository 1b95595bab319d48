"""Xray's access lines: users and sources, the owners of endpoints, and which lines a controller sees."""

from __future__ import annotations

import itertools
from ipaddress import IPv4Address, IPv6Address
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drivers.sockets.sock_diag import endpoint
from drivers.xray.access import Accepted, BadMask, Mask, Records, Shown, parse
from drivers.xray.ownership import Endpoints
from node.base.logs import printable
from scripts.attack.mutate import mutated
from tests.harness.many import many, seeds

NEW, OLD = "2026/11/21 02:17:57.788507 ", "2026/11/21 02:17:57 "
STAMPS = st.sampled_from([NEW, OLD])
ANNA = endpoint("127.0.1.2", 53843)
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FFF, categories=("L", "N", "P")), min_size=1)


def written(address: IPv4Address | IPv6Address, port: int) -> str:
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


@given(
    STAMPS,
    st.sampled_from(["", "tcp:", "udp:"]),
    st.ip_addresses(),
    st.integers(1, 65535),
    st.sampled_from(["tcp:example.com:443", "udp:8.8.8.8:53", "[2001:db8::1]:443"]),
    st.sampled_from(["in >> out", "VLESS [TCP] A -> B ==> direct", "in -> out"]),
    st.sampled_from(["", "reason text"]),
    NAMES.filter(lambda name: " email: " not in name),
)
def test_accepted(
    stamp: str, source: str, address: IPv6Address, port: int, target: str, detour: str, reason: str, email: str
) -> None:
    """Every form of line about an accepted connection is parsed, with any content."""
    where = f"{stamp}from {source}{written(address, port)} accepted {target}"
    why = f" [{detour}]" + (f" {reason}" if reason else "")
    expected = Accepted(email, endpoint(str(address), port), target, detour, source == "udp:")
    assert parse(f"{where}{why} email: {email}") == expected
    assert expected.udp is target.startswith("udp:")


@pytest.mark.parametrize(
    "line",
    [
        "from 127.0.*.*:53843 accepted tcp:a.test:80 [in >> out] email: anna",
        "from [Masked IPv4]:53843 accepted tcp:a.test:80 [in >> out] email: anna",
        "from [Masked IPv6]:53843 accepted tcp:a.test:80 [in >> out] email: anna",
        "from [2001:db8::/32]:53843 accepted tcp:a.test:80 [in >> out] email: anna",
        "from @ accepted tcp:a.test:80 [in >> out] email: anna",
        "from 127.0.1.2:99999 accepted tcp:a.test:80 [in >> out] email: anna",
        "from 127.0.1.222222:5 accepted tcp:a.test:80 [in >> out] email: anna",
        "from 127.0.1.2:53843 accepted tcp:a.test:80 [in >> out]",
        "from 127.0.1.2:53843 accepted tcp:a.test:80 email: anna",
        "from 127.0.1.2:53843 rejected  proxy/vless/encoding: failed email: anna",
        "from DNS accepted https://dns.test/dns-query [in >> out] email: anna",
        "[Warning] core: from 127.0.1.2:53843 accepted tcp:a.test:80 email: anna",
    ],
)
def test_not_an_endpoint(line: str) -> None:
    """Lines without a whole endpoint of a user give nothing."""
    assert parse(NEW + line) is None
    assert parse(line) is None


@pytest.mark.parametrize(
    ("source", "forwarded"), [("127.0.1.2:0", True), ("[2001:db8::1]:0", True), ("1.2.3.4:5", False)]
)
def test_a_forwarded_address_has_no_port(source: str, forwarded: bool) -> None:
    """A reverse proxy reports an address, and the core logs port 0."""
    found = parse(f"{NEW}from {source} accepted tcp:a.test:80 [in >> out] email: anna")
    assert found is not None
    assert found.forwarded is forwarded


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    """No line raises an error."""
    parse(text)
    parse(f"{NEW}from 1.2.3.4:5 accepted {text}")
    parse(f"{NEW}from {text} accepted tcp:a:1 email: anna")


def test_what_a_user_writes_does_not_count() -> None:
    """A target that looks like the end of a line does not change the user."""
    line = f"{NEW}from 127.0.1.2:53843 accepted tcp:x [in >> out] email: bert:443 [in >> out] email: anna"
    accepted = parse(line)
    assert accepted is not None
    assert accepted.email == "anna"


# What the core prints about a rejected name, and about accepted ones. Some of these cannot contain brackets; with
# the others a user can forge the route, too, but must know an inbound's tag.
REFUSED = NEW + "from 10.0.0.9:99 rejected  common/protocol: invalid domain name: {}"
AS_ERROR = NEW + "[Info] [1] proxy: failed to create request > common/protocol: invalid domain name: {}"
TARGET = NEW + "from 10.0.0.9:99 accepted tcp:{}:80 [socks >> direct]"
TAKEN = NEW + "from 10.0.0.9:99 accepted tcp:{}:80 [hysteria >> direct] email: evil"
FORGED = NEW + "from 10.0.0.1:1 accepted tcp:a.test:80 [home >> direct] email: bert"
TRUE = NEW + "from 10.0.0.2:2 accepted tcp:a.test:80 [home >> direct] email: anna"

# What the core prints about connections of unknown users.
STRANGER = NEW + "from 127.0.0.2:60759 rejected  "
STRANGERS = [
    STRANGER + reason
    for reason in (
        "proxy/vless/encoding: invalid request user id: e4afd168-d714-45b3-ba0a-a7a9d4c5cca2",
        "proxy/vless/encoding: invalid request version",
        "proxy/trojan: not a valid user",
        "proxy/trojan: not trojan protocol",
        "common/drain: common/drain: unable to drain connection > EOF > "
        "proxy/vmess/encoding: invalid user > user do not exist",
        "common/drain: common/drain: unable to drain connection > EOF > "
        "proxy/shadowsocks: failed to match an user > proxy/shadowsocks: Not Found",
        "common/drain: common/drain: unable to drain connection > EOF > "
        "proxy/shadowsocks: failed to read 50 bytes > EOF",
        "proxy/vmess/encoding: failed to read request header > unexpected EOF",
        "proxy/vmess/encoding: failed to read request header > "
        "read tcp 127.0.0.1:16451->127.0.0.1:38588: read: connection reset by peer",
    )
]


def trusted(records: Records, text: str) -> list[str]:
    return [line for line in text.split("\n") if records.is_one(line)]


@given(
    st.sampled_from([(REFUSED, 255), (AS_ERROR, 255), (TARGET, 8191), (TAKEN, 2048)]),
    st.lists(st.sampled_from(["\n", FORGED, "x", "\n\n", f"\n{FORGED}\n", REFUSED[:60], "\r", NEW, *STRANGERS])),
    st.integers(0, 8191),
)
def test_what_a_user_writes_is_no_record(form: tuple[str, int], parts: list[str], padding: int) -> None:
    """No line forged in a name is trusted, however it is cut; later lines of the core are."""
    record, most = form
    name = ("".join(parts)[: most - padding % most] + "x" * (padding % most))[:most].removesuffix("\n")
    records = Records()
    if not name.startswith(FORGED):
        name = "\n" + name[: most - 1]
    assert FORGED not in trusted(records, record.format(name))
    trusted(records, "\n".join([TRUE] * 100))
    assert trusted(records, TRUE) == [TRUE]


def test_ordinary_lines_are_trusted() -> None:
    """Lines of many users are all trusted, also between lines about DNS and of other kinds."""
    records = Records()
    lines = [
        TRUE,
        NEW + "from DNS accepted https://1.1.1.1/dns-query",
        NEW + "[Info] accepted",
        TARGET,
        TRUE,
        FORGED,
        TRUE,
    ]
    assert [line for line in lines if records.is_one(line)] == lines


@pytest.mark.parametrize("stranger", STRANGERS, ids=itertools.count())
def test_a_line_behind_a_stranger(stranger: str) -> None:
    """A rejection for the credential contains no text of the client, unless the line says so."""
    records = Records()
    assert trusted(records, f"{stranger}\n{TRUE}") == [stranger, TRUE]
    # A client of a WebSocket chooses the end of the drained connection's error.
    closed = "common/drain: common/drain: unable to drain connection > websocket: close 1000 (normal): {}"
    for record in (REFUSED, AS_ERROR, f"{NEW}from 10.0.0.9:99 rejected  {{}}", f"{STRANGER}{closed}"):
        reason = stranger.partition("rejected  ")[2]
        assert TRUE not in trusted(records, record.format(f"x {reason}\n{TRUE}"))


# What the core prints about how a client closed a connection, or which name it asked for. Run: the first three.
TOLD = [
    (STRANGER + "proxy/vmess/encoding: failed to read request header > websocket: close 1000 (normal): {}", 123),
    (NEW + "[Info] [1] app/proxyman/inbound: connection ends > websocket: close 4999: {}", 123),
    (NEW + "[Info] REALITY: processed invalid connection from 10.0.0.9:9: server name mismatch: {}", 65_000),
    (NEW + "[Info] [1] app/proxyman/inbound: connection ends > Application error 0x0 (remote): {}", 1400),
]


@pytest.mark.parametrize(("record", "most"), TOLD, ids=itertools.count())
def test_what_a_stranger_says_is_no_record(record: str, most: int) -> None:
    """No line forged in an error is trusted, however far behind the error's begin; later lines of the core are."""
    for before in ("x\n", "x" * (most - 100) + "\n", "x\n" + f"{NEW}[Info] x\n" * (most // 50)):
        records = Records()
        text = before[: most - len(FORGED)].rstrip("\n")
        assert FORGED not in trusted(records, record.format(f"{text}\n{FORGED}"))
        trusted(records, "\n".join([TRUE] * (most // 50 + 10)))
        assert trusted(records, TRUE) == [TRUE]


def test_connections_that_end_are_trusted() -> None:
    """An ordinary end of a WebSocket has no text of the client, and lines behind it are trusted."""
    for end in ("websocket: close 1000 (normal)", "websocket: close 1006 (abnormal closure): unexpected EOF", "EOF"):
        assert TRUE in trusted(Records(), f"{NEW}[Info] [1] app/proxyman/inbound: connection ends > {end}\n{TRUE}")


WHERE = st.sampled_from([endpoint(f"10.0.0.{host}", port) for host in range(1, 3) for port in (1, 2)])
KEYS = ("anna", "bert", "cora")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["open", "close"]), WHERE),
        st.tuples(st.sampled_from(["note", "guess"]), WHERE, st.sampled_from(KEYS)),
        st.tuples(st.sampled_from(["age", "settle"])),
    ),
    max_size=40,
)


# A user gets the endpoint that another one had claimed: a guess from before does not count any more.
@example(
    [
        ("note", ANNA, "anna"),
        ("age",),
        ("open", ANNA),
        ("note", ANNA, "bert"),
        ("settle",),
        ("guess", ANNA, "anna"),
    ]
)
@given(STEPS)
def test_an_endpoint_keeps_its_owner(steps: list[tuple[Any, ...]]) -> None:
    """While its socket lives an endpoint keeps its owner, whatever lines say; a closed one is forgotten."""
    endpoints = Endpoints()
    numbers = itertools.count(1)
    live: dict[Any, int] = {}
    seen: dict[Any, int] | None = None
    owners: dict[int, str] = {}
    for name, *rest in steps:
        where = rest[0] if rest else ANNA
        if name == "open":
            live[where] = next(numbers)
        elif name == "close":
            live.pop(where, None)
        elif name == "note":
            first = endpoints.holder(where) is None
            assert endpoints.note(*rest) == (endpoints.holder(where) == rest[1])
            if first and where in live:
                owners[live[where]] = rest[1]
        elif name == "guess":
            endpoints.guess(*rest)
            assert where in endpoints.of({endpoints.holder(where) or rest[1]})
        elif name == "age":
            endpoints.age()
            seen = dict(live)
        elif seen is not None:
            endpoints.settle(seen)
            seen = None
        assert all(endpoints.of({key}) == walked(endpoints, key) for key in KEYS)
        for where, socket in live.items():
            if socket in owners:
                assert endpoints.holder(where) == owners[socket]
    for _ in range(2):
        endpoints.age()
        endpoints.settle(live)
    assert endpoints.of(set(KEYS)) <= live.keys()
    assert len(endpoints) <= len(live)


def walked(endpoints: Endpoints, key: str) -> set[bytes]:
    """Where this user is by a walk through all."""
    held = {where for part in (endpoints._old, endpoints._young) for where, other in part.items() if other == key}
    return held | {where for where, some in endpoints._guesses.items() if key in some}


def look(endpoints: Endpoints, live: dict[bytes, int | None]) -> dict[bytes, str]:
    endpoints.age()
    return endpoints.settle(live)


def test_a_port_that_is_used_again() -> None:
    """The user of a new socket gets the endpoint, also if their line comes before all else."""
    endpoints = Endpoints()
    assert endpoints.note(ANNA, "anna")
    look(endpoints, {ANNA: 1})
    assert not endpoints.note(ANNA, "bert")
    assert look(endpoints, {ANNA: 1}) == {}
    assert not endpoints.note(ANNA, "bert")
    assert look(endpoints, {ANNA: 2}) == {ANNA: "bert"}
    assert endpoints.holder(ANNA) == "bert"
    look(endpoints, {ANNA: 3})
    assert endpoints.holder(ANNA) is None
    assert endpoints.note(ANNA, "cora")


def test_without_cookies() -> None:
    """Without cookies the newest user gets the endpoint."""
    endpoints = Endpoints()
    endpoints.note(ANNA, "anna")
    endpoints.note(ANNA, "bert")
    assert look(endpoints, {ANNA: None}) == {ANNA: "bert"}


def test_a_shared_endpoint_has_no_owner() -> None:
    """A connection that may carry several users, and carried two, has no owner until it is closed."""
    endpoints = Endpoints(shared=True)
    endpoints.note(ANNA, "anna")
    assert endpoints.of({"anna"}) == {ANNA}
    endpoints.note(ANNA, "bert")
    endpoints.age()
    endpoints.note(ANNA, "anna")
    assert endpoints.of({"anna", "bert"}) == set()
    assert endpoints.holder(ANNA) is None
    look(endpoints, {})
    endpoints.note(ANNA, "anna")
    assert endpoints.of({"anna"}) == {ANNA}


def test_noted_during_a_look_stays() -> None:
    """A connection noted during a look is kept although the look did not find it."""
    endpoints = Endpoints()
    endpoints.note(ANNA, "anna")
    endpoints.age()
    endpoints.note(endpoint("10.0.0.1", 1), "bert")
    endpoints.settle({})
    assert endpoints.of({"anna", "bert"}) == {endpoint("10.0.0.1", 1)}


def test_oldest_go_first() -> None:
    """The oldest endpoints are dropped first."""
    endpoints = Endpoints()
    wheres = [endpoint("10.0.0.1", port) for port in range(1, 11)]
    for number, where in enumerate(wheres):
        endpoints.note(where, "anna")
        if number == 4:
            endpoints.age()
    endpoints.note(wheres[0], "anna")
    endpoints.drop(4)
    assert endpoints.of({"anna"}) == {wheres[0], *wheres[5:]}


@pytest.mark.parametrize(
    ("mask", "ipv4", "ipv6"),
    [
        ("quarter", "93.*.*.*", "[2606::/16]"),
        ("half", "93.184.*.*", "[2606:2800::/32]"),
        ("full", "[Masked IPv4]", "[Masked IPv6]"),
        ("/24+/64", "93.184.216.*", "[2606:2800:220:1::/64]"),
        ("32+128", "93.184.216.34", "[2606:2800:220:1:248:1893:25c8:1946]"),
        ("/16", "93.184.*.*", "[Masked IPv6]"),
        ("+/64", "[Masked IPv4]", "[2606:2800:220:1::/64]"),
    ],
)
def test_masks(mask: str, ipv4: str, ipv6: str) -> None:
    """Addresses are masked as in Xray, source and target alike, and nothing else in the line is."""
    shown = Shown(mask=Mask.of(mask))
    for stamp in (NEW, OLD):
        before = f"{stamp}from 93.184.216.34:1 accepted tcp:[2606:2800:220:1:248:1893:25c8:1946]:443 [a >> b] email: x"
        assert shown.line(before) == f"{stamp}from {ipv4}:1 accepted tcp:{ipv6}:443 [a >> b] email: x"
    assert shown.line(f"{NEW}[Info] app: dialing 93.184.216.34") == f"{NEW}[Info] app: dialing {ipv4}"


@pytest.mark.parametrize(
    "mask", ["/12+/64", "third", "/40", "-8", "/16+x", "9" * 5000, "/16+" + "1" * 5000, "\u0661\u0666", "/"]
)
def test_bad_masks(mask: str) -> None:
    """A mask that Xray would refuse is refused."""
    with pytest.raises(BadMask):
        Mask.of(mask)


def test_nothing_asked_nothing_masked() -> None:
    """Without a mask lines stay unchanged."""
    assert Mask.of("") is None
    line = f"{NEW}from 93.184.216.34:1 accepted tcp:a.test:443 [a >> b] email: x"
    assert Shown().line(line) == line


@given(STAMPS, st.sampled_from(["accepted", "rejected"]))
def test_access_lines_are_withheld(stamp: str, status: str) -> None:
    """Access lines that the controller did not ask for are withheld; other lines are not."""
    shown = Shown(access=False)
    assert shown.line(f"{stamp}from 1.2.3.4:5 {status} tcp:a.test:443") is None
    for line in (f"{stamp}[Info] from 1.2.3.4:5 {status}", "panic: from", "from 1.2.3.4:5"):
        assert shown.line(line) == line


@pytest.mark.parametrize(
    "begin", ["", "tcp:", "[Info] [1] proxy/vless: invalid request from ", "[Info] read 127.0.0.1:1->"]
)
def test_connections_of_our_own(begin: str) -> None:
    """The node's own connections are in no log; targets of users are, whatever they are."""
    line = begin + "127.84.88.78:5 rejected  x"
    assert Shown().line(NEW + (line if "[" in begin else f"from {line}")) is None
    for told in (
        "from 1.2.3.4:5 accepted tcp:127.84.88.78:80 [a >> b] email: x",
        "from 1.2.3.4:5 accepted tcp: from 127.84.88.78:80 [a >> b] email: x",
        "from 1.2.3.4:5 rejected  x",
        "from 127.84.88.79:5 rejected  x",
    ):
        assert Shown().line(NEW + told) == NEW + told


@many
@given(seeds)
def test_any_lines(seed: int) -> None:
    """Any text that users have the core print is parsed or not, and shown on one line or withheld."""
    random = Random(seed)
    record = NEW + "from tcp:127.0.1.2:53843 accepted tcp:a.test:80 [in >> out] email: anna"
    text = mutated(random.choice((record, f"{record}\n{record}")).encode(), random)
    records, shown = Records(), Shown(mask=Mask.of(random.choice(("half", "/16+/48", ""))))
    for line in text.decode(errors="replace").split("\n"):
        found = parse(line)
        assert found is None or found.email in line
        records.is_one(line)
        assert "\n" not in printable(shown.line(line) or "")
