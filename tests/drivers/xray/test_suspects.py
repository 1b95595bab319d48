"""Which connection a user had before his credential changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drivers.xray.suspects import LATE, Pair, Suspects

PAIRS: list[Pair] = [("home", "anna"), ("home", "bert"), ("work", "anna")]
connections = st.sampled_from([b"a", b"b", b"c", b"d"])
changes = st.tuples(st.sets(st.sampled_from(PAIRS)), st.sets(connections), st.floats(0, LATE))


@given(st.lists(changes, max_size=12), st.floats(0, 2 * LATE), st.integers(0, 12))
def test_who_was_there_before(steps: list[tuple[set[Pair], set[bytes], float]], after: float, handed: int) -> None:
    """Those who were connected at a user's last change and at each look since, for as long as lines may be late.

    Also for the next program of the node, which is handed what is known at some time.
    """
    suspects, now = Suspects(), 100.0
    changed: dict[Pair, tuple[float, int]] = {}
    for number, (pairs, connected, passed) in enumerate(steps):
        now += passed
        suspects.add(pairs, connected, now)
        if number == handed:
            packed, suspects = suspects.packed(now), Suspects()
            suspects.unpack(packed, now)
        changed.update(dict.fromkeys(pairs, (now, number)))
    for pair in PAIRS:
        since, number = changed.get(pair, (now, len(steps)))
        there = [connected for _, connected, _ in steps[number:]]
        expected = set.intersection(*there) if there and now + after < since + LATE else set()
        assert {where for where in (b"a", b"b", b"c", b"d") if suspects.has(pair, where, now + after)} == expected


def test_nothing_is_kept_for_ever() -> None:
    """Changes of long ago are forgotten with the next one, and all of them when it is asked for."""
    suspects = Suspects()
    for number in range(10):
        suspects.add([("home", f"{number}")], {b"a"}, now := 100 + number * 2 * LATE)
        assert len(suspects) == 1
    suspects.prune(now + LATE)
    assert len(suspects) == 0
