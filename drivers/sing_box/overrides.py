"""Remove or redirect parts of a sing-box configuration: APIs, files, programs, directories. Pure.

Names of keys: `option/*.go` of sing-box 1.14.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivers.process.json_text import Json

# Services that open an API of the core.
_APIS = ("api", "ssm-api")
# The lists whose items have a tag, by default their index.
TAGGED = ("inbounds", "outbounds", "endpoints")
# Keys, at any depth, that name a file to write or a program to run, …
_DROPPED = (
    *("pid_file", "usages_path", "taildrop_directory", "executable_path", "wrapper_path", "write_to_system"),
    # This one runs programs of the desktop.
    "set_system_proxy",
)
# … or a directory where the core keeps files.
DIRECTORIES = ("data_directory", "state_directory")


def take_over(tree: Json, directory: Path) -> Iterator[str]:
    """Remove what opens an API, writes files or runs programs from `tree`. Yields a warning for each."""
    experimental = tree.get("experimental", {})
    for name in ("clash_api", "v2ray_api", "debug", "cache_file"):
        if experimental.pop(name, None) is not None:
            yield f"experimental.{name} is removed from the configuration: the node does not let a core have it"
    services = tree.get("services", [])
    for service in services:
        if service.get("type") in _APIS:
            yield f"the service {service['type']} is removed from the configuration: the node adds its own"
        elif service.get("type") == "derp":
            service["config_path"] = str(directory / "derp.key")
    tree["services"] = [service for service in services if service.get("type") not in _APIS]
    if tree.get("log", {}).pop("output", None):
        yield "log.output is removed from the configuration: the node reads the log"
    yield from _take_over_paths(tree, directory)
    _part(tree, directory / "kept")


def _part(tree: Json, kept: Path) -> None:
    """Give each endpoint and so on that keeps state a directory of its own, by its tag.

    Two that share one would be the same machine to their peers.
    """
    for kind in TAGGED:
        for handler in tree.get(kind, []):
            # By default all endpoints of this type share the core's directory.
            unasked = {"state_directory"} if handler.get("type") == "tailscale" else set()
            for key in handler.keys() & DIRECTORIES | unasked:
                name = hashlib.sha256(f"{kind} {handler['tag']}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
                handler[key] = str(kept / name)


def _take_over_paths(value: Any, directory: Path) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _take_over_paths(item, directory)
    if isinstance(value, dict):
        for key in _DROPPED:
            if value.pop(key, None) is not None:
                yield f"{key} is removed from the configuration: a core may not write files or run programs for it"
        for key in DIRECTORIES:
            if key in value:
                value[key] = str(directory / "kept")
        if "acme" in value or value.get("type") == "acme":
            acme = value.get("acme", value)
            if isinstance(acme, dict):
                acme["data_directory"] = str(directory / "kept")
        for item in value.values():
            yield from _take_over_paths(item, directory)
