"""What the node takes out of a configuration of sing-box, or puts elsewhere: APIs, files, programs, directories. Pure.

Names of keys: `option/*.go` of sing-box 1.14.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]

# Services that are, or open, an API of the core.
_APIS = ("api", "ssm-api")
# What has a tag, or the core's number for one.
TAGGED = ("inbounds", "outbounds", "endpoints")
# Keys that name a file to be written or a program to be run, anywhere, …
_DROPPED = (
    *("pid_file", "usages_path", "taildrop_directory", "executable_path", "wrapper_path", "write_to_system"),
    # Programs of the desktop are run for that.
    "set_system_proxy",
)
# … or a directory that the core keeps things in.
DIRECTORIES = ("data_directory", "state_directory")


def take_over(tree: Json, directory: Path) -> Iterator[str]:
    """Take out what opens an API, writes files or runs programs; in words what that was."""
    experimental = tree.get("experimental", {})
    for name in ("clash_api", "v2ray_api", "debug", "cache_file"):
        if experimental.pop(name, None) is not None:
            yield f"experimental.{name} of the configuration is left out: the node does not let a core have one"
    services = tree.get("services", [])
    for service in services:
        if service.get("type") in _APIS:
            yield f"the service {service['type']} of the configuration is left out: the node has its own"
        elif service.get("type") == "derp":
            service["config_path"] = str(directory / "derp.key")
    tree["services"] = [service for service in services if service.get("type") not in _APIS]
    if tree.get("log", {}).pop("output", None):
        yield "log.output of the configuration is left out: the node reads the log"
    yield from _take_over_paths(tree, directory)
    _part(tree, directory / "kept")


def _part(tree: Json, kept: Path) -> None:
    """Give each that keeps something a directory of its own, by its tag: two in one would be one machine to others."""
    for kind in TAGGED:
        for handler in tree.get(kind, []):
            # Without a directory of its own an endpoint of this type has the core's, like all others.
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
                yield f"{key} of the configuration is left out: a core writes no file and runs no program for it"
        for key in DIRECTORIES:
            if key in value:
                value[key] = str(directory / "kept")
        if "acme" in value or value.get("type") == "acme":
            _keep_certificates(value, directory)
        for item in value.values():
            yield from _take_over_paths(item, directory)


def _keep_certificates(value: Json, directory: Path) -> None:
    acme = value.get("acme", value)
    if isinstance(acme, dict):
        acme["data_directory"] = str(directory / "kept")
