"""Connections that a user made before their credential changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
        suspects.add(pairs, connected, now)
        if number == handed:
            packed, suspects = suspects.packed(now), OldCredentials()
            suspects.unpack(packed, now)
        changed.update(dict.fromkeys(pairs, (now, number)))
    for pair in PAIRS:
        since, number = changed.get(pair, (now, len(steps)))
        there = [connected for _, connected, _ in steps[number:]]
        expected = set.intersection(*there) if there and now + after < since + LATE else set()
        assert {where for where in (b"a", b"b", b"c", b"d") if suspects.has(pair, where, now + after)} == expected


def test_nothing_is_kept_for_ever() -> None:
    """Old changes are forgotten at the next one, and all of them by a prune."""
    suspects = OldCredentials()
    for number in range(10):
        suspects.add([("home", f"{number}")], {b"a"}, now := 100 + number * 2 * LATE)
        assert len(suspects) == 1
    suspects.prune(now + LATE)
    assert len(suspects) == 0
