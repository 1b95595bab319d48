"""Connections that a user made before their credential changed."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from drivers.sockets import sock_diag as diag
from drivers.sockets.core_connections import LISTED, STALE
from drivers.sockets.sock_diag import Ports
from drivers.xray import connections as module
from drivers.xray.connections import Connections
from drivers.xray.ingress import Ingress
from drivers.xray.ownership import LATE, OldCredentials, Pair

PAIRS: list[Pair] = [("home", "anna"), ("home", "bert"), ("work", "anna")]
connections = st.sampled_from([b"a", b"b", b"c", b"d"])
changes = st.tuples(st.sets(st.sampled_from(PAIRS)), st.sets(connections), st.floats(0, LATE))


@given(st.lists(changes, max_size=12), st.floats(0, 2 * LATE), st.integers(0, 12))
def test_connections_from_before_a_change(
    steps: list[tuple[set[Pair], set[bytes], float]], after: float, handed: int
) -> None:
    """Connections from before a user's last change are recognised, as long as their lines may be late.

    Also after a handover to the next node process.
    """
    suspects, now = OldCredentials(), 100.0
    changed: dict[Pair, tuple[float, int]] = {}
    for number, (pairs, connected, passed) in enumerate(steps):
        now += passed
        suspects.look(dict.fromkeys(connected, 1), now)
        suspects.add(pairs, now)
        if number == handed:
            packed, suspects = suspects.packed(now), OldCredentials()
            suspects.unpack(packed, now)
        changed.update(dict.fromkeys(pairs, (now, number)))
    for pair in PAIRS:
        since, number = changed.get(pair, (now, len(steps)))
        there = [connected for _, connected, _ in steps[number:]]
        expected = set.intersection(*there) if there and now + after < since + LATE else set()
        assert {where for where in (b"a", b"b", b"c", b"d") if suspects.has(pair, where, now + after)} == expected


def test_a_port_used_again() -> None:
    """Another socket at an endpoint is another connection, if it is known to be another one."""
    for sockets, old in (((1, 1, 1), True), ((1, 2, 2), False), ((1, 1, 2), False), ((1, 0, 2), True)):
        suspects = OldCredentials()
        first, *others = sockets
        suspects.look({b"a": first}, 100)
        suspects.add([("home", "anna")], 100)
        for socket in others:
            suspects.look({b"a": socket}, 100)
        assert suspects.has(("home", "anna"), b"a", 100) is old
        assert suspects.socket(b"a") == others[-1]


def test_nothing_is_kept_for_ever() -> None:
    """Old changes are forgotten at the next one, and all of them by a prune."""
    suspects = OldCredentials()
    for number in range(10):
        suspects.look({b"a": 1}, now := 100 + number * 2 * LATE)
        suspects.add([("home", f"{number}")], now)
        assert len(suspects) == 1
    suspects.prune(now + LATE)
    assert len(suspects) == 0


class FakeKernel:
    """Counts connections when they come, and lists them a moment later."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.count = self.looks = 0
        # From when on each is listed.
        self.listed: dict[bytes, float] = {}

    def arrivals(self) -> int:
        return self.count

    def cookies(self, _: Ports) -> dict[bytes, int]:
        self.looks += 1
        return {where: int(where) for where, since in self.listed.items() if since <= self._clock.seconds()}


ANNA = ("home", "anna")
# A new connection that is listed after so many seconds, the end of the oldest one, or a change of credential.
events = st.sampled_from(["change", "end", 0.0, 0.9 * LISTED])


@given(st.lists(st.tuples(events, st.sampled_from([0, LISTED / 2, 2 * LISTED, STALE])), min_size=5))
def test_no_connection_is_missed(steps: list[tuple[float | str, float]]) -> None:
    """Whenever connections come and end: at a change of credential, those listed by the kernel are the old ones."""
    clock = Clock()
    kernel = FakeKernel(clock)
    connections = Connections(clock, {"home": Ingress((range(1, 2),))})  # type: ignore[arg-type]
    connections.begin(1, lambda _: True, mock.Mock())

    def change() -> None:
        assert Deferred.fromCoroutine(connections.credentials_change([ANNA])).called

    with (
        mock.patch.object(module, "cookies", kernel.cookies),
        mock.patch.multiple(diag, arrivals=kernel.arrivals, connections=lambda _: []),
    ):
        for event, passed in steps:
            if event == "end":
                kernel.listed.pop(next(iter(kernel.listed), b""), None)
            elif event == "change":
                change()
                old = {where for where, since in kernel.listed.items() if since <= clock.seconds()}
                has = connections._old_credentials.has
                assert {where for where in kernel.listed if has(ANNA, where, clock.seconds())} == old
            else:
                assert isinstance(event, float)
                kernel.count += 1
                kernel.listed[b"%d" % kernel.count] = clock.seconds() + event
            clock.advance(passed)
        for _ in range(2):
            change()
            clock.advance(2 * LISTED)
        looks = kernel.looks
        for _ in range(10):
            change()
    assert kernel.looks == looks, "no connection has come since"
    connections.stop()
