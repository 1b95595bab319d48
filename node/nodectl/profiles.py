"""The nodes file: addresses of nodes, and the files of their certificates and keys; and a client's target of each."""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from node.client import Target
from node.nodectl.exits import Unusable

PORTS = {"rest": 62051, "grpc": 62050}
# The variable with the key of nodes without a key_file.
KEY = "NODECTL_KEY"
# The name of the node on this machine, unless the nodes file has a node of this name.
LOCAL = "local"


@dataclass(frozen=True)
class Profile:
    """One node. Without `certificate` the machine's authorities are trusted. `certificate_name`: if not the address."""

    name: str
    address: str
    transport: Literal["rest", "grpc"] = "rest"
    port: int = PORTS["rest"]
    certificate: Path | None = None
    certificate_name: str = ""
    key_file: Path | None = None
    key: str = field(default="", repr=False)

    def target(self, environ: Mapping[str, str]) -> Target:
        """The target to call this node: the address, the trusted certificate and the key. Raises `Unusable`."""
        target = Target(
            self.transport,
            self.address,
            self.port,
            key=self._key(environ),
            trust=None if self.certificate is None else self._text(self.certificate),
            certificate_name=self.certificate_name,
        )
        try:
            target.certificates()
        except ValueError as error:
            raise Unusable(f"{self.name}: {self.certificate} is not a certificate: {error}")
        return target

    def _key(self, environ: Mapping[str, str]) -> str:
        """The key: from the profile's file, else from the environment, else from the local node's settings."""
        if self.key_file is not None:
            self._require_closed(self.key_file)
            return self._text(self.key_file).strip()
        if key := environ.get(KEY, "").strip() or self.key:
            return key
        raise Unusable(f"{self.name}: no key: set key_file in the nodes file, or {KEY} in the environment")

    def _require_closed(self, file: Path) -> None:
        try:
            mode = file.stat().st_mode
        except OSError as error:
            raise Unusable(f"{self.name}: the key file cannot be read: {error}")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise Unusable(f"{self.name}: other users can read the key in {file}: chmod 600 {file}")

    def _text(self, file: Path) -> str:
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise Unusable(f"{self.name}: {file} cannot be read: {error}")


@dataclass(frozen=True)
class Nodes:
    """The nodes file: the nodes in its order, and the names of those to call by default."""

    profiles: Mapping[str, Profile] = field(default_factory=dict)
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
    profiles = {name: _profile(name, table, directory) for name, table in tables.items()}
    return Nodes(profiles, _default(default, profiles))


def _default(value: Any, profiles: Mapping[str, Profile]) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(name in profiles or name == LOCAL for name in names):
        raise ValueError(f"default is {value!r}: it must be names of nodes in this file")
    return tuple(names)


def _profile(name: str, table: Mapping[str, Any], directory: Path) -> Profile:
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
    return Profile(
        name,
        address=table.get("address") or name,
        transport=cast(Literal["rest", "grpc"], transport),
        port=port,
        certificate=_path(table, "certificate", directory),
        certificate_name=table.get("certificate_name", ""),
        key_file=_path(table, "key_file", directory),
    )


def _path(table: Mapping[str, Any], field: str, directory: Path) -> Path | None:
    return directory / Path(table[field]).expanduser() if table.get(field) else None
