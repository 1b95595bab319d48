"""The fuzzers of a node's ports, by name."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.attack import broken, http1, http2, messages
from scripts.attack.siege import Attack

KINDS: Mapping[str, Attack] = {
    "http1": http1.attack,
    "http2": http2.attack,
    "messages": messages.attack,
    "broken": broken.attack,
}
