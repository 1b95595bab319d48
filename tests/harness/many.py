"""How often a property is tried of which a few examples say little: what takes bytes that anybody may have made."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

# Of each such property; with the profile `nightly` a hundred times as many, with `brief` fewer.
many = settings(max_examples=17 * settings().max_examples)
# For examples that are made of a `Random`: what is mutated from something valid gets further than what is made up.
seeds = st.integers(0, 2**64 - 1)
