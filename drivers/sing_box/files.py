"""Find the files that a configuration names, and refuse those that the operator does not allow. Pure, but for links.

Names of keys: `option/*.go` of sing-box 1.14.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from drivers.process.confinement import Touched
from drivers.process.json_text import Named, is_abstract, texts
from drivers.process.paths import Paths
from node.base.errors import InvalidConfig

Json = dict[str, Any]

# Keys whose values are files end like this, …
_FILE = re.compile(r"(.*_)?(path|files?|directory)")
# … except for keys that the node itself has set, or whose values are not files of this machine.
_NO_FILE = ("process_path", "tcp_multi_path", "data_directory", "state_directory", "path")
# The options of a plugin, as the core parses them (`transport/sip003/args.go`): one option, its name and value.
_OPTION = re.compile(r"(?:\\.|[^\\;])++", re.DOTALL)
_SET = re.compile(r"((?:\\.|[^\\=])++)=(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
# Places where the key `path` names a file.
_LISTS = re.compile(r"route\.rule_set\[\d+\]\.path(\[\d+\])?")
_HOSTS = re.compile(r"dns\.servers\[\d+\]\.path(\[\d+\])?")
_SERVED = re.compile(r"\.masquerade\.directory$")
# TCP ports: values of keys like these, those of ACME challenges, and that of the replacement for systemd-resolved.
_PORT = re.compile(r"listen_port|alternative_(http|tls)_port")
_CHALLENGES = (80, 443)
_RESOLVED = 53


def asked(tree: Json, paths: Paths, unconfined: str | None) -> Touched:
    """Return the files, ports and sockets that a configuration names. Raises `InvalidConfig` for a forbidden file."""
    plugged = list(_of_plugins(tree))
    for named in (*texts(tree), *plugged):
        if named.text and _is_file(named):
            if unconfined is not None and _SERVED.search(named.place):
                raise InvalidConfig(
                    f"{named.place}: a core that is not confined may not serve a directory: {unconfined}"
                )
            if "$" in named.text:
                raise InvalidConfig(
                    f"{named.place}: {named.text!r} contains a $, which the core may expand to another path"
                )
            paths.require(named.text, named.place)
    found = (range(port, port + 1) for port in sorted(set(_ports(tree))))
    files = paths.named_in(tree) | {named.text for named in plugged}
    return Touched(files, (), tuple(found), is_abstract(tree))


def _of_plugins(tree: Json) -> Iterator[Named]:
    """The certificates in the options of Shadowsocks plugins."""
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
        return False  # derp's key: the node sets this path
    return _FILE.fullmatch(named.key) is not None


def _ports(value: Any) -> Iterator[int]:
    """The TCP ports that any part of the configuration may listen on."""
    rest = [value]
    while rest:
        some = rest.pop()
        rest += some.values() if isinstance(some, dict) else some if isinstance(some, list) else ()
        if isinstance(some, dict):
            named = [port for key, port in some.items() if _PORT.fullmatch(key)]
            yield from (port for port in named if isinstance(port, int) and 0 < port <= 0xFFFF)
            yield from _CHALLENGES if "acme" in some or some.get("type") == "acme" else ()
            yield from [_RESOLVED] if some.get("type") == "resolved" else ()
