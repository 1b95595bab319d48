"""The nodes file: addresses of nodes, and the files of their certificates and keys."""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from node.client import Target
from node.nodectl.output import Unusable

PORTS = {"rest": 62051, "grpc": 62050}
# The name of the node on this machine, unless the nodes file has a node of this name.
LOCAL = "local"
# The variable with the key of nodes without a key_file.
KEY = "NODECTL_KEY"


@dataclass(frozen=True)
class Nodes:
    """The nodes in the order of the file, by name, and the names of those to call by default."""

    targets: Mapping[str, Target] = field(default_factory=dict)
    default: tuple[str, ...] = ()


_TYPES: Mapping[str, type] = {
    "address": str,
    "port": int,
    "transport": str,
    "certificate": str,
    "certificate_name": str,
    "key_file": str,
}
_NAMES = {str: "a string", int: "an integer"}


def read(path: Path, needed: bool) -> Nodes:
    """Read a nodes file; it may be missing unless `needed`. Raises `Unusable`."""
    try:
        return parse(path.read_text(), path.parent)
    except FileNotFoundError:
        if needed:
            raise Unusable(f"the nodes file {path} does not exist")
        return Nodes()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise Unusable(f"the nodes file {path} cannot be used: {error}")


def parse(text: str, directory: Path) -> Nodes:
    """Parse the text of a nodes file; its paths are relative to `directory`. Raises `ValueError`."""
    document = tomllib.loads(text)
    tables = document.pop("nodes", {})
    default = document.pop("default", [])
    if document:
        raise ValueError(f"unknown: {', '.join(document)}; known are default and nodes")
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError("nodes is not a table of tables: write [nodes.NAME] above each node")
    targets = {name: _target(name, table, directory) for name, table in tables.items()}
    names = [default] if isinstance(default, str) else default
    if not isinstance(names, list) or not all(name in targets or name == LOCAL for name in names):
        raise ValueError(f"default is {default!r}: it must be names of nodes in this file")
    return Nodes(targets, tuple(names))


def with_secrets(name: str, target: Target, environ: Mapping[str, str]) -> Target:
    """The target with the texts of its certificate and its key, to be called. Raises `Unusable`.

    The key is that of the file, else of the environment, else of the local node's settings.
    """
    if isinstance(target.key, Path):
        _require_closed(name, target.key)
        key = _text(name, target.key).strip()
    else:
        key = environ.get(KEY, "").strip() or target.key
        if not key:
            raise Unusable(f"{name}: no key: set key_file in the nodes file, or {KEY} in the environment")
    trust = _text(name, target.trust) if isinstance(target.trust, Path) else target.trust
    found = replace(target, key=key, trust=trust)
    try:
        found.certificates()
    except ValueError as error:
        raise Unusable(f"{name}: {target.trust} is not a certificate: {error}")
    return found


def _target(name: str, table: Mapping[str, Any], directory: Path) -> Target:
    if not name or "," in name or name != name.strip():
        raise ValueError(f"{name!r} cannot be a node's name: it must not be empty, have commas or outer spaces")
    for setting, value in table.items():
        if setting not in _TYPES:
            raise ValueError(f"{name} has the unknown field {setting!r}; known are {', '.join(_TYPES)}")
        if not isinstance(value, _TYPES[setting]) or isinstance(value, bool):
            raise ValueError(f"{setting} of {name} is {value!r}: it must be {_NAMES[_TYPES[setting]]}")
    transport = table.get("transport", "rest")
    if transport not in PORTS:
        raise ValueError(f"transport of {name} is {transport!r}: it must be {' or '.join(PORTS)}")
    port = table.get("port", PORTS[transport])
    if not 1 <= port <= 65535:
        raise ValueError(f"port of {name} is {port}: it must be between 1 and 65535")
    certificate, key = (
        directory / Path(table[file]).expanduser() if table.get(file) else None for file in ("certificate", "key_file")
    )
    return Target(
        cast(Literal["rest", "grpc"], transport),
        table.get("address") or name,
        port,
        key or "",
        certificate,
        certificate_name=table.get("certificate_name", ""),
    )


def _require_closed(name: str, file: Path) -> None:
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise Unusable(f"{name}: the key file cannot be read: {error}")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Unusable(f"{name}: other users can read the key in {file}: chmod 600 {file}")


def _text(name: str, file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"{name}: {file} cannot be read: {error}")
