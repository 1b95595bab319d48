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
# Options of a plugin, as the core reads them (`transport/sip003/args.go`): each, and its name and what it is set to.
_OPTION = re.compile(r"(?:\\.|[^\\;])++", re.DOTALL)
_SET = re.compile(r"((?:\\.|[^\\=])++)=(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
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
    plugged = list(_of_plugins(tree))
    for named in (*texts(tree), *plugged):
        if named.text and _is_file(named):
            if unconfined is not None and _SERVED.search(named.place):
                raise InvalidConfig(f"{named.place}: a directory is not served to strangers here: {unconfined}")
            if "$" in named.text:
                raise InvalidConfig(f"{named.place}: {named.text!r} has a $, where the core could read another path")
            paths.require(named.text, named.place)
    found = (range(port, port + 1) for port in sorted(set(_ports(tree))))
    files = readable(tree, paths) | {named.text for named in plugged}
    return Touched(files, (), tuple(found), is_abstract(tree))


def _of_plugins(tree: Json) -> Iterator[Named]:
    """The certificates that options of the plugins of Shadowsocks name."""
    for named in texts(tree):
        if named.key == "plugin_opts":
            for found in filter(None, map(_SET.fullmatch, _OPTION.findall(named.text))):
                name, value = (_ESCAPED.sub(r"\1", part) for part in found.groups())
                if name == "cert":
                    yield Named(f"{named.place}, cert", "certificate_path", value)


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
