"""The file of nodes: where each is, and which files have its certificate and its key. Pure but for `read`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from node.nodectl.exits import Unusable

PORTS = {"rest": 62051, "grpc": 62050}
# The node of this machine; a profile of this name goes before it.
LOCAL = "local"


@dataclass(frozen=True)
class Profile:
    """One node. Without `certificate` the machine's authorities count; `certificate_name` is what it is issued to."""

    name: str
    address: str
    transport: Literal["rest", "grpc"] = "rest"
    port: int = PORTS["rest"]
    certificate: Path | None = None
    certificate_name: str = ""
    key_file: Path | None = None
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Nodes:
    """What the file says: the nodes, in its order, and those that are asked where none is named."""

    profiles: Mapping[str, Profile] = field(default_factory=dict)
    default: tuple[str, ...] = ()


_WORDS = {
    "address": str,
    "port": int,
    "transport": str,
    "certificate": str,
    "certificate_name": str,
    "key_file": str,
}


def read(path: Path, needed: bool) -> Nodes:
    """The nodes of this file. Raises `Unusable`; without `needed` it may be missing."""
    try:
        return parse(path.read_text(), path.parent)
    except FileNotFoundError:
        if needed:
            raise Unusable(f"there is no file {path}")
        return Nodes()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise Unusable(f"{path} cannot be used: {error}")


def parse(text: str, directory: Path) -> Nodes:
    """The nodes of a text; paths are relative to `directory`. Raises `ValueError`."""
    said = tomllib.loads(text)
    tables = said.pop("nodes", {})
    default = said.pop("default", [])
    if said:
        raise ValueError(f"it has {', '.join(said)}; it may have default and nodes")
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError("nodes is no table of tables: write [nodes.NAME] above each node")
    profiles = {name: _profile(name, table, directory) for name, table in tables.items()}
    return Nodes(profiles, _default(default, profiles))


def _default(said: Any, profiles: Mapping[str, Profile]) -> tuple[str, ...]:
    names = [said] if isinstance(said, str) else said
    if not isinstance(names, list) or not all(name in profiles or name == LOCAL for name in names):
        raise ValueError(f"default is {said!r}: it must be names of nodes of this file")
    return tuple(names)


def _profile(name: str, table: Mapping[str, Any], directory: Path) -> Profile:
    if not name or "," in name or name != name.strip():
        raise ValueError(f"{name!r} is no name of a node")
    for word, value in table.items():
        if word not in _WORDS:
            raise ValueError(f"{name} has {word!r}; it may have {', '.join(_WORDS)}")
        if not isinstance(value, _WORDS[word]) or isinstance(value, bool):
            raise ValueError(f"{word} of {name} is {value!r}")
    transport = table.get("transport", "rest")
    if transport not in PORTS:
        raise ValueError(f"transport of {name} is {transport!r}; it may be {' or '.join(PORTS)}")
    port = table.get("port", PORTS[transport])
    if not 1 <= port <= 65535:
        raise ValueError(f"port of {name} is {port}")
    return Profile(
        name,
        address=table.get("address") or name,
        transport=cast(Literal["rest", "grpc"], transport),
        port=port,
        certificate=_path(table, "certificate", directory),
        certificate_name=table.get("certificate_name", ""),
        key_file=_path(table, "key_file", directory),
    )


def _path(table: Mapping[str, Any], word: str, directory: Path) -> Path | None:
    return directory / Path(table[word]).expanduser() if table.get(word) else None
