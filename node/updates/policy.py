"""What an operator decides of updates, and what the cores say of where theirs come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Seconds between two looks for newer lists, by the words of GEO_UPDATE.
EVERY = {"never": 0.0, "daily": 86_400.0, "weekly": 7 * 86_400.0, "monthly": 30 * 86_400.0}
LISTS_URL = "https://github.com/Loyalsoldier/v2ray-rules-dat/releases/latest/download"


@dataclass(frozen=True)
class Policy:
    """`programs`: keys of scope all may replace cores and the node; `lists`: geo files. Addresses as settings say."""

    programs: bool = False
    lists: bool = True
    lists_every: float = 0.0
    lists_url: str = LISTS_URL
    program_url: str = ""
    proxy: str = ""


@dataclass(frozen=True)
class Sources:
    """By the names of cores: what stands before `/v<version>/<archive>`, and the executable that the operator set.

    `reads_lists` is the type of the core that reads lists, `lists_configured` where the operator has them.
    """

    mirrors: Mapping[str, str] = field(default_factory=dict)
    configured: Mapping[str, str] = field(default_factory=dict)
    reads_lists: int = 0
    lists_configured: str = ""
