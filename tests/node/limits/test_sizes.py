"""Parsing of sizes."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.limits.parsing import MOST, size

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@given(
    st.integers(0, 10**6),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(["", "B", "b"]),
    st.sampled_from(["", " "]),
    st.sampled_from([str.upper, str.lower, str]),
)
def test_a_number_of_units(count: int, unit: str, byte: str, space: str, case: type[str]) -> None:
    """Whatever the case, with and without the B, the space, and white space around."""
    text = f" {count}{space if unit else ''}{case(unit)}{byte} "
    assert size(text) == count * UNITS[unit]


@given(st.integers(0, MOST))
def test_bytes(count: int) -> None:
    """A number alone is bytes."""
    assert size(str(count)) == count


@pytest.mark.parametrize(("text", "count"), [("1.5TB", 1_500_000_000_000), ("0.5 GiB", 2**29), ("0", 0)])
def test_fractions(text: str, count: int) -> None:
    """Fractions of a unit, if they are whole bytes."""
    assert size(text) == count


@pytest.mark.parametrize(
    "text", ["", "TB", "-1", "1.2.3G", "1e3", "0.3", "1,5T", "9EiB", "1 000", "9PiBs", "²", str(MOST + 1)]
)
def test_invalid_sizes(text: str) -> None:
    """They raise an error; nothing is guessed."""
    with pytest.raises(ValueError, match=r"size|bytes"):
        size(text)


@given(st.text(max_size=12))
def test_any_text(text: str) -> None:
    """It is parsed, or raises `ValueError`."""
    with suppress(ValueError):
        assert 0 <= size(text) <= MOST
