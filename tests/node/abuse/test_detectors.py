"""Torrents, scans and mail are recognised, and what browsers, games and calls do is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.abuse.detectors import HOSTS, QUIET, SCAN, SCAN_HALF, TRACKERS, Targets, Watch
from node.contract.abuse import Kind, Request

HERE = bytes([127, 0, 0, 2])
# A moment, in seconds, and what the user asks for then.
Timed = tuple[float, Request]


def asked(target: str, *, udp: bool = False, torrent: bool = False, answered: bool = False) -> Request:
    return Request("anna", HERE, "in", target, udp, torrent, answered)


def kinds(requests: Iterable[Timed], watch: Watch | None = None) -> list[tuple[float, Kind]]:
    """What is found, and when."""
    watch = watch or Watch(0.0)
    return [(now, kind) for now, request in requests for kind in watch.judge(request, now)]


def host(rng: random.Random) -> str:
    return ".".join(str(rng.randrange(1, 255)) for _ in range(4))


def evenly(requests: Iterable[Request], begin: float, seconds: float) -> Iterator[Timed]:
    some = list(requests)
    return ((begin + seconds * number / len(some), request) for number, request in enumerate(some))


# One minute of harmless users


def browser(rng: random.Random, begin: float) -> Iterator[Timed]:
    """300 targets, in bursts as pages load; some on unusual ports, some that do not answer, DNS beside them."""
    now = begin
    for _ in range(300):
        now += rng.expovariate(300 / 50) if rng.random() < 0.9 else rng.uniform(0, 1)
        port = rng.choices((443, 80, 8080, 8443, rng.randrange(1024, 65536)), (90, 6, 1, 1, 2))[0]
        name = f"{rng.randrange(10**6)}.example" if rng.random() < 0.7 else host(rng)
        yield now, asked(f"{name}:{port}", udp=port == 443 and rng.random() < 0.3, answered=rng.random() < 0.9)
        if rng.random() < 0.2:
            yield now, asked(f"{host(rng)}:53", udp=True)


def game(rng: random.Random, begin: float) -> Iterator[Timed]:
    """A list of 150 servers, most on the usual port, then one of them, voice, and the platform's services."""
    servers = [f"{host(rng)}:{rng.choices((27015, rng.randrange(27016, 27040)), (7, 3))[0]}" for _ in range(150)]
    some = [asked(server, udp=True) for server in servers]
    some += [
        asked(f"{host(rng)}:{port}", udp=True) for port in (3478, 4379, 27000, *rng.sample(range(50000, 60000), 5))
    ]
    some += [asked(f"{host(rng)}:{port}") for port in (443, 443, 27017, 27018, 27019, 5222, 5223)]
    yield from evenly(some, begin, 60)


def call(rng: random.Random, begin: float) -> Iterator[Timed]:
    """Candidates of fifteen people, each with some ports, relays, and the web."""
    some = [asked(f"{host(rng)}:{port}", udp=True) for port in (3478, 3478, 19302, 19305, 443)]
    for _ in range(15):
        person = host(rng)
        some += [asked(f"{person}:{rng.randrange(10000, 60000)}", udp=True) for _ in range(2)]
    some += [asked(f"{host(rng)}:443") for _ in range(40)]
    rng.shuffle(some)
    yield from evenly(some, begin, 60)


@pytest.mark.parametrize("user", [browser, game, call])
def test_no_false_alarms(user: Callable[[random.Random, float], Iterator[Timed]]) -> None:
    """None in a thousand minutes of one user, one after the other."""
    rng, watch = random.Random(user.__name__), Watch(0.0)
    for minute in range(1000):
        found = kinds(user(rng, 60.0 * minute), watch)
        assert not found, (minute, found)


# Abuse


def test_a_scan_of_ports() -> None:
    """200 ports in 10 s: within 4 s."""
    found = kinds(evenly((asked(f"192.0.2.1:{number * 37 + 1}") for number in range(200)), 3.0, 10))
    assert found[0][1] is Kind.SCAN and found[0][0] - 3.0 < 4


@pytest.mark.parametrize(("port", "count"), [(22, 10), (3389, 10), (110, 50), (4444, 51), (443, 505)])
def test_a_scan_of_hosts(port: int, count: int) -> None:
    """One port of many hosts: some are enough where worms try, many more where browsers go."""
    some = [asked(f"198.51.{number // 250}.{number % 250}:{port}") for number in range(2 * count)]
    found = [number for number, (now, request) in enumerate(evenly(some, 0.0, 4)) if number and now < 4 and request]
    watch = Watch(0.0)
    first = next(number for number in found if [*watch.judge(some[number], 1.0)])
    assert count * 0.9 <= first + 1 <= count * 1.2


def test_answers_count_less() -> None:
    """Who administers thirty servers that answer scans nothing; of thirty that do not, one does."""
    servers = [f"192.0.2.{number}:22" for number in range(30)]
    assert not kinds((1.0, asked(server, answered=True)) for server in servers)
    assert kinds((1.0, asked(server)) for server in servers)


def test_slowly_is_no_scan() -> None:
    """As many targets over minutes."""
    assert not kinds(evenly((asked(f"192.0.2.1:{number}") for number in range(100, 300)), 0.0, 120))


def test_a_recognised_torrent_each_time() -> None:
    """What the core recognised is found at once, and each time again."""
    again = [(0.1 * number, asked("192.0.2.1:6000", torrent=True)) for number in range(5)]
    assert [kind for _, kind in kinds(again)] == [Kind.TORRENT] * 5


def test_trackers_by_port() -> None:
    """One target on a port of trackers is nothing yet, some are a torrent."""
    trackers = [(1.0, asked(f"tracker{number}.example:6969", udp=True)) for number in range(TRACKERS)]
    assert not kinds(trackers[:-1])
    assert [kind for _, kind in kinds(trackers)] == [Kind.TORRENT]


def peers(rng: random.Random, count: int, udp: float) -> list[Request]:
    """Peers of an encrypted torrent: a quarter on the usual ports, the others anywhere."""
    ports = [rng.choices((rng.choice((6881, 51413)), rng.randrange(1024, 65536)), (1, 3))[0] for _ in range(count)]
    return [asked(f"{host(rng)}:{port}", udp=rng.random() < udp) for port in ports]


@pytest.mark.parametrize("udp", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("each_minute", "share"), [(120, 1.0), (60, 1.0), (45, 0.5)])
def test_an_encrypted_torrent_by_behaviour(udp: float, each_minute: int, share: float) -> None:
    """Many hosts on many high ports: found within two minutes, and not as a scan."""
    rng, found = random.Random(f"{udp} {each_minute}"), 0
    for _ in range(50):
        some = kinds(evenly(peers(rng, 2 * each_minute, udp), rng.uniform(0, 60), 120))
        assert all(kind is Kind.TORRENT for _, kind in some)
        found += bool(some)
    assert found >= share * 50


def test_many_peers_are_no_scan() -> None:
    """Not even 200 in ten seconds."""
    some = kinds(evenly(peers(random.Random(1), 200, 0.5), 0.0, 10))
    assert {kind for _, kind in some} == {Kind.TORRENT}


def test_mail() -> None:
    """Each connection to port 25, not other ports of mail, and no datagram."""
    mail = [(float(number), asked("mx.example:25")) for number in range(3)]
    assert [kind for _, kind in kinds(mail)] == [Kind.MAIL] * 3
    assert not kinds([(1.0, asked("mx.example:587")), (2.0, asked("mx.example:125")), (3.0, asked("a:25", udp=True))])


def test_the_window_moves() -> None:
    """What was long ago does not count."""
    half = int(SCAN) // 2 + 5
    first = [(1.0, asked(f"192.0.2.1:{port}")) for port in range(100, 100 + half)]
    second = [asked(f"192.0.2.1:{port}") for port in range(200, 200 + half)]
    assert kinds([*first, *((1.0 + SCAN_HALF, request) for request in second)])
    assert not kinds([*first, *((1.0 + 2 * SCAN_HALF, request) for request in second)])
    assert not kinds([*first, *((1.0 + 2 * QUIET, request) for request in second)])
    old = [(1.0, request) for request in peers(random.Random(2), HOSTS - 5, 0.0)]
    new = [(1.0 + QUIET, request) for request in peers(random.Random(3), HOSTS - 5, 0.0)]
    assert not [kind for _, kind in kinds([*old, *new]) if kind is Kind.SCAN]


@given(st.lists(st.tuples(st.integers(), st.integers(0, 3)), max_size=300))
def test_sets_never_count_more(steps: list[tuple[int, int]]) -> None:
    """The count is at most that of different numbers in the last two halves, and a number is new once."""
    targets, halves = Targets(), [set[int](), set[int]()]
    for number, moves in steps:
        if moves:
            targets.move(moves)
            halves = [halves[1] if moves == 1 else set(), set()]
        before = len(targets)
        is_new = targets.add(number)
        assert is_new is (len(targets) == before + 1)
        assert not (is_new and number in halves[0] | halves[1])
        if is_new:
            halves[1].add(number)
        assert len(targets) <= len(halves[0]) + len(halves[1])


@given(st.lists(st.builds(asked, st.text(), udp=st.booleans(), torrent=st.booleans(), answered=st.booleans())))
def test_any_request(requests: list[Request]) -> None:
    """Any text of a target is judged."""
    found = kinds((0.1 * number, request) for number, request in enumerate(requests))
    assert all(one <= two for (one, _), (two, _) in pairwise(found))


@pytest.mark.parametrize(
    "target", ["", ":", "host", "host:", "host:1e3", "host:" + "9" * 8000, "host:\u0665", "\udcff:25"]
)
def test_odd_targets(target: str) -> None:
    """Whatever a user asks for, the watch goes on."""
    assert set(Watch(0.0).judge(asked(target), 1.0)) <= {Kind.MAIL}
