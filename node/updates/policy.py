"""The operator's settings of updates, and the sources of cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Seconds between two checks for newer geo files, by the values of GEO_UPDATE.
EVERY = {"never": 0.0, "daily": 86_400.0, "weekly": 7 * 86_400.0, "monthly": 30 * 86_400.0}
LISTS_URL = "https://github.com/Loyalsoldier/v2ray-rules-dat/releases/latest/download"


@dataclass(frozen=True)
class Policy:
    """`programs`: whether keys of scope all may replace cores and the node; `lists`: geo files. URLs as configured."""

    programs: bool = False
    lists: bool = True
    lists_every: float = 0.0
    lists_url: str = LISTS_URL
    program_url: str = ""
    proxy: str = ""


@dataclass(frozen=True)
class Sources:
    """By a core's name, `mirrors` has the base URL of `/v<version>/<archive>`.

    `reads_lists` is the type of the core that reads geo files.
    """

    mirrors: Mapping[str, str] = field(default_factory=dict)
    reads_lists: int = 0
