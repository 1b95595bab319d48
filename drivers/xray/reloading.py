"""Geo files that an operator replaces while a core runs: newer cores read them again by themselves. Pure.

Without assets their app only reads what is there (`app/geodata` of Xray-core 26.7.28): all that is in use, changed or
not, so a tick with the usual files costs most of a second. No call has them read, and nothing watches them. What
cannot be read leaves the former lists in force.
"""

from __future__ import annotations

import re

from drivers.json_text import parse
from drivers.process.named import texts
from protos.xray_pb2 import Config, GeodataConfig, TypedMessage

APP = "xray.app.geodata.Config"
# Older cores do not start with such an app.
SINCE = (26, 4, 25)
RATE = "@every 1h"
# An entry of a rule, of the DNS or of its hosts, whose names are keys. Several may stand in one text.
_ENTRY = re.compile(r"(?:^|,)\s*!*(?:geoip|geosite|ext(?:-\w+)?):", re.IGNORECASE)


def have_reloaded(base: Config, said: str, version: tuple[int, ...]) -> None:
    """Have a core that can read its geo files again do so, unless the configuration has its own ways or needs none.

    `said` is the text that names them, or does not.
    """
    if version >= SINCE and not any(app.type == APP for app in base.app) and names_lists(said):
        base.app.append(TypedMessage(type=APP, value=GeodataConfig(cron=RATE).SerializeToString()))


def are_reloaded(base: Config) -> bool:
    """Whether a core with this configuration reads its geo files again while it runs."""
    return any(app.type == APP and GeodataConfig.FromString(app.value).cron for app in base.app)


def names_lists(said: str) -> bool:
    """Whether a text may name geo files; one that cannot be read may."""
    try:
        tree = parse(said)
    except ValueError:
        return True
    return any(_ENTRY.search(word) for named in texts(tree) for word in (named.key, named.text))
