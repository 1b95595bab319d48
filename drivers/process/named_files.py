"""Find the files and sockets that a configuration names under any key. Pure, but for following links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from drivers.process.paths import Paths
from node.base.errors import InvalidConfig

# The most files that a configuration may name: each becomes a rule.
MOST = 1000


class Named(NamedTuple):
    """A string of a configuration: its path of keys, its key, and the string."""

    place: str
    key: str
    text: str


def texts(tree: Any) -> Iterator[Named]:
    """Yield every string of a configuration; one in a list has the key of the list."""
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
    """Return all strings that may be allowed files, under any key. Raises `InvalidConfig` for too many."""
    found = frozenset(named.text for named in texts(tree) if paths.may_allow(named.text))
    if len(found) > MOST:
        raise InvalidConfig(f"the configuration names more than {MOST:,} files")
    return found


def is_abstract(tree: Any) -> bool:
    """Whether a string may name an abstract socket."""
    return any(named.text.startswith("@") for named in texts(tree))
