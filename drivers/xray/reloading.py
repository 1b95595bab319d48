"""Have newer cores reload the geo files that an operator replaces while a core runs. Pure.

Their geodata app without assets reads the local files again (`app/geodata` of Xray-core 26.7.28): all that are in use,
changed or not, which takes most of a second with the usual files. No API call triggers it, and the core does not watch
the files. If a file cannot be read the former lists stay in force.
"""

from __future__ import annotations

import re

from drivers.json_text import parse
from drivers.process.named_files import texts
from protos.xray_pb2 import Config, GeodataConfig, TypedMessage

APP = "xray.app.geodata.Config"
# Older cores do not start with this app.
SINCE = (26, 4, 25)
RATE = "@every 1h"
# A geo list in a rule or the DNS, also as a key of its hosts. One text may have several.
_ENTRY = re.compile(r"(?:^|,)\s*!*(?:geoip|geosite|ext(?:-\w+)?):", re.IGNORECASE)


def have_reloaded(base: Config, source: str, version: tuple[int, ...]) -> None:
    """Add the app that reloads geo files, if the core has it and `source` (the text) names any.

    A configuration with its own geodata app stays as it is.
    """
    if version >= SINCE and not any(app.type == APP for app in base.app) and names_lists(source):
        base.app.append(TypedMessage(type=APP, value=GeodataConfig(cron=RATE).SerializeToString()))


def are_reloaded(base: Config) -> bool:
    """Whether a core with this configuration reloads its geo files while it runs."""
    return any(app.type == APP and GeodataConfig.FromString(app.value).cron for app in base.app)


def names_lists(source: str) -> bool:
    """Whether a text may name geo files; True for one that cannot be parsed."""
    try:
        tree = parse(source)
    except ValueError:
        return True
    return any(_ENTRY.search(word) for named in texts(tree) for word in (named.key, named.text))
