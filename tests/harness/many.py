"""More hypothesis examples for properties of parsers of untrusted bytes, where a few examples prove little."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

# A multiple of the profile's examples: `nightly` has a hundred times as many as the default, `brief` fewer.
many = settings(max_examples=17 * settings().max_examples)
# Seeds for a `Random` that mutates valid input, which gets further than arbitrary input.
seeds = st.integers(0, 2**64 - 1)
