"""Files and sockets that a configuration names, wherever it does. Pure, but for links that are followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from drivers.process.paths import Paths
from node.errors import InvalidConfig

# Files above which a configuration is refused: each is a rule.
MOST = 1000


class Named(NamedTuple):
    """A text of a configuration: the keys on the way to it, and itself."""

    place: str
    key: str
    text: str


def texts(tree: Any) -> Iterator[Named]:
    """Every text of a configuration, those in lists by the key of their list."""
    rest: list[tuple[str, str, Any]] = [("", "", tree)]
    while rest:
        place, key, value = rest.pop()
        if isinstance(value, str):
            yield Named(place.removeprefix("."), key, value)
        elif isinstance(value, dict):
            rest += [(f"{place}.{name}", name, some) for name, some in value.items()]
        elif isinstance(value, list):
            rest += [(f"{place}[{number}]", key, some) for number, some in enumerate(value)]


def readable(tree: Any, paths: Paths) -> frozenset[str]:
    """All that may be a file which is allowed, under whatever key. Raises `InvalidConfig` for too many."""
    found = frozenset(named.text for named in texts(tree) if paths.may_allow(named.text))
    if len(found) > MOST:
        raise InvalidConfig(f"the configuration names more than {MOST:,} files")
    return found


def is_abstract(tree: Any) -> bool:
    """Whether a socket that is in no directory may be meant."""
    return any(named.text.startswith("@") for named in texts(tree))
