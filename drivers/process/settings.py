"""The settings that apply to every core, and the limit of a core's own memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from drivers.install.releases import Core
from node.base.settings import Setting, fault_of_address

_AMOUNT = re.compile(r"([0-9]{1,12})([KMG%]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
# The least CORE_MEMORY: no core starts with less.
LEAST = 128 * 1024**2
# GOMEMLIMIT as a part of the limit: from there on Go frees memory before it takes more, and needs room for that.
_SOFT = 0.85


def memory_amount(text: str, machine: int) -> int | None:
    """Parse a number with K, M or G, or a percentage of the machine's memory, to bytes; None if it is neither."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return None
    number, unit = int(match[1]), match[2].upper()
    return number * machine // 100 if unit == "%" else number * _UNITS[unit]


def fault_of_memory(text: str) -> str:
    """Return why a value of CORE_MEMORY is invalid; empty if it is valid."""
    found = memory_amount(text, _machine())
    if found is None:
        return f"{text!r} is no number of bytes (with K, M or G) and no per cent of the machine's memory"
    return f"{text!r} is less than {LEAST // 1024**2}M" if found < LEAST else ""


def memory_limit(text: str) -> int | None:
    """Return CORE_MEMORY in bytes; None if nothing is set."""
    return memory_amount(text, _machine()) if text else None


def soft_limit(most: int | None) -> dict[str, str]:
    """Return the environment variable for Go's run-time."""
    return {} if most is None else {"GOMEMLIMIT": str(int(most * _SOFT))}


def _machine() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _fault_of_paths(text: str) -> str:
    """Return why these directories cannot be used, or ""."""
    wrong = [word for word in text.split(os.pathsep) if word and not Path(word).is_absolute()]
    return f"{wrong[0]!r} is not an absolute path" if wrong else ""


CORE_PATHS = Setting(
    "CORE_PATHS",
    "directories, separated by `:`, whose files a configuration may name: certificates, lists, files to serve",
    "/etc/letsencrypt",
    fault=_fault_of_paths,
    details="Absolute paths. Add the directory of your certificates if it is another one. The node refuses a "
    "configuration that names other files: see [install.md](install.md#what-a-core-can-read).",
)
CORE_ALLOW = Setting(
    "CORE_ALLOW",
    "parts that a configuration may have although the node refuses them by default, comma-separated; see "
    "docs/configuration.md",
    details="The error `invalid_config` has the name to add. Such parts may run programs or change the machine's "
    "routes: read [what is refused and why](configuration.md#refused-parts) first.",
)
CORE_MEMORY = Setting(
    "CORE_MEMORY",
    "memory that one process of a core may have of its own: bytes (`512M`, `2G`) or per cent of the machine's (`60%`), "
    "128M or more (default: no limit)",
    fault=fault_of_memory,
    details="A core that needs more crashes and is started again, which protects the rest of the machine. Leave room "
    "for two: a new core runs beside the old one while that drains.",
)
USER_INBOUNDS = Setting(
    "USER_INBOUNDS",
    "count users' bytes by inbound: off or on",
    "off",
    choices=("off", "on"),
    details="The core then knows each user by another name in each inbound, and counts each apart; logs, lists, "
    "counters and replies have the users' own names. A core that has many users online needs more memory, and reading "
    "its counters takes longer: see [benchmarks.md](benchmarks.md). `nodectl users list --traffic` shows the bytes. A "
    "changed value applies from the core's next start on (see `UPGRADE_ON_START`). The `webhook` of a routing rule "
    "gets the core's names.",
)
SETTINGS = (CORE_PATHS, CORE_ALLOW, CORE_MEMORY, USER_INBOUNDS)


def settings_of(core: Core) -> tuple[Setting, ...]:
    """The settings that each core has: the path of its executable, and where its archives are downloaded from."""
    return (
        Setting(
            core.variable("EXECUTABLE_PATH"),
            f"executable of {core.title} to run (default: found on PATH or in the cores directory)",
            details="Set it to run a build of your own. A release that an update installed takes precedence until you "
            "change this setting: see [updates.md](updates.md#cores).",
        ),
        Setting(
            core.variable("DOWNLOAD_URL"),
            f"base URL for downloads of {core.title}; the node appends /v<version>/<archive>",
            core.url,
            fault=fault_of_address,
            details="Set a mirror where the official server is not reachable. Archives have to match their SHA-256 "
            "from there, too.",
        ),
    )
