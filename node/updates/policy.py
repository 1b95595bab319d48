"""The operator's settings of updates, and the sources of cores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from node.base.settings import Options, address, chosen, setting, word

# Seconds between two checks for newer geo files, by the values of GEO_UPDATE.
EVERY = {"never": 0.0, "daily": 86_400.0, "weekly": 7 * 86_400.0, "monthly": 30 * 86_400.0}
# The geo files of each region: a release for users there, with digests.
REGIONS = {
    "china": "https://github.com/Loyalsoldier/v2ray-rules-dat/releases/latest/download",
    "iran": "https://github.com/Chocolate4U/Iran-v2ray-rules/releases/latest/download",
    "russia": "https://github.com/runetfreedom/russia-v2ray-rules-dat/releases/latest/download",
}
LISTS_URL = REGIONS["china"]


def _proxy(text: str) -> str:
    if text and not re.fullmatch(r"https?://[^\s/]\S*", text):
        raise ValueError("it does not begin with https:// or http:// and a host")
    return text


@dataclass(frozen=True)
class Policy(Options):
    """`programs`: whether keys of scope all may replace cores and the node; `lists`: geo files. URLs as configured."""

    programs: bool = setting("UPDATES", "off", chosen("on", "off")).help(
        "on or off: keys of scope all may install other releases of the cores and of the node; see docs/updates.md",
        "Off, such a key cannot change programs on the machine. Turn it on to update a fleet over the interface.",
    )
    proxy: str = setting("UPDATE_PROXY", read=_proxy, secret=True).help(
        "proxy for the downloads of updates, as http://HOST:PORT (default: that of the environment)",
        "Set it where the download servers are not reachable directly. It may hold a password, so it cannot be "
        "an option.",
    )
    lists: bool = setting("GEO_UPDATES", "on", chosen("on", "off")).help(
        "on or off: keys of scope all may replace geo files over the interface",
        "Turn it off if you keep these files yourself. Off also turns off GEO_UPDATE.",
    )
    lists_every: float = setting("GEO_UPDATE", "never", lambda text: EVERY[word(*EVERY)(text)]).help(
        "how often the node looks for newer geo files and installs them: never, daily, weekly or monthly",
        "Set it if neither your panel nor a timer updates them.",
    )
    lists_url: str = setting("GEO_URL", LISTS_URL, address).help(
        "base URL of the geo files; NAME.sha256sum beside each holds its digest",
        "Set it to use other lists, or a mirror.",
    )

    def lists_of(self, region: str) -> str:
        """The base URL of a region's geo files; the operator's own server has the same for all regions."""
        return REGIONS.get(region, LISTS_URL) if self.lists_url == LISTS_URL else self.lists_url


@dataclass(frozen=True)
class Sources:
    """By a core's name, `mirrors` has the base URL of `/v<version>/<archive>`, and `newest` the newest known version.

    `reads_lists` is the type of the core that reads geo files.
    """

    mirrors: Mapping[str, str]
    reads_lists: int
    newest: Mapping[str, str] = field(default_factory=dict)
