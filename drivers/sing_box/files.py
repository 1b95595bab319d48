"""Files of the machine that a configuration names: refused where the operator does not allow them. Pure, but for links.

Names of keys: `option/*.go` of sing-box 1.14.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from drivers.process.confinement import Touched
from drivers.process.named import Named, is_abstract, readable, texts
from drivers.process.paths import Paths
from node.errors import InvalidConfig

Json = dict[str, Any]

# Keys of files end like this, …
_FILE = re.compile(r"(.*_)?(path|files?|directory)")
# … but for those that the node has set by itself, or that are no file of this machine.
_NO_FILE = ("process_path", "tcp_multi_path", "data_directory", "state_directory", "path")
# Where `path` is one.
_LISTS = re.compile(r"route\.rule_set\[\d+\]\.path(\[\d+\])?")
_HOSTS = re.compile(r"dns\.servers\[\d+\]\.path(\[\d+\])?")
_SERVED = re.compile(r"\.masquerade\.directory$")
# Ports of TCP: those that have names like these, those of ACME's challenges, and that of systemd-resolved's stand-in.
_PORT = re.compile(r"listen_port|alternative_(http|tls)_port")
_CHALLENGES = (80, 443)
_RESOLVED = 53


def asked(tree: Json, paths: Paths, unconfined: str | None) -> Touched:
    """What a configuration names. Raises `InvalidConfig` for a file that it must not name."""
    for named in texts(tree):
        if named.text and _is_file(named):
            if unconfined is not None and _SERVED.search(named.place):
                raise InvalidConfig(f"{named.place}: a directory is not served to strangers here: {unconfined}")
            paths.require(named.text, named.place)
    found = (range(port, port + 1) for port in sorted(set(_ports(tree))))
    return Touched(readable(tree, paths), (), tuple(found), is_abstract(tree))


def _is_file(named: Named) -> bool:
    if named.key in _NO_FILE:
        return bool(_LISTS.fullmatch(named.place) or _HOSTS.fullmatch(named.place))
    if named.key == "config_path" and named.place.startswith("services["):
        return False  # derp's key, which the node keeps
    return _FILE.fullmatch(named.key) is not None


def _ports(value: Any) -> Iterator[int]:
    """Where it may listen, by whatever part of it."""
    rest = [value]
    while rest:
        some = rest.pop()
        rest += some.values() if isinstance(some, dict) else some if isinstance(some, list) else ()
        if isinstance(some, dict):
            yield from (port for key, port in some.items() if _PORT.fullmatch(key) and _is_port(port))
            yield from _CHALLENGES if "acme" in some or some.get("type") == "acme" else ()
            yield from [_RESOLVED] if some.get("type") == "resolved" else ()


def _is_port(value: Any) -> bool:
    return isinstance(value, int) and 0 < value <= 0xFFFF
