"""Override the apps of a configuration: counters on, logs to the console, its own APIs off, geo files reloaded. Pure.

Numbers of fields: Xray-core 26.3.27.
"""

from __future__ import annotations

from drivers.xray.access import BadMask, Mask, Shown
from drivers.xray.messages import COMMANDER, GEODATA, LOG, METRICS, POLICY, ROUTER, STATS, Version, edited
from drivers.xray.text import names_lists
from node.base.errors import InvalidConfig
from protos import xray_pb2
from protos.xray_pb2 import Config, GeodataConfig, TypedMessage

_CONSOLE = 1
# The first version with the app that reloads geo files; older ones do not start with it.
RELOADS_SINCE: Version = (26, 4, 25)


def override(base: Config, count_inbounds: bool) -> Shown:
    """Turn counters on, send logs to the console and remove other APIs; all other apps stay as and where they are.

    Returns which lines the controller asked for.
    """
    kept = [app for app in base.app if app.type not in (COMMANDER, METRICS)]
    del base.app[:]
    base.app.extend(kept)
    with edited(_app(base, LOG), xray_pb2.LogConfig) as log:
        shown = _override_log(log)
    with edited(_app(base, POLICY), xray_pb2.PolicyConfig) as policy:
        _count(policy, count_inbounds)
    for needed in (ROUTER, STATS):
        _app(base, needed)
    return shown


def have_reloaded(base: Config, source: str, version: Version) -> None:
    """Have the core reload geo files that an operator replaces, if it can and `source` (the text) names any.

    Its geodata app without assets reads the local files again (`app/geodata` of Xray-core 26.7.28): all that are in
    use, changed or not, which takes most of a second with the usual files. No API call triggers it, and the core does
    not watch the files. If a file cannot be read the former lists stay in force. A configuration with its own geodata
    app stays as it is.
    """
    if version >= RELOADS_SINCE and not any(app.type == GEODATA for app in base.app) and names_lists(source):
        base.app.append(TypedMessage(type=GEODATA, value=GeodataConfig(cron="@every 1h").SerializeToString()))


def are_reloaded(base: Config) -> bool:
    """Whether a core with this configuration reloads its geo files while it runs."""
    return any(app.type == GEODATA and GeodataConfig.FromString(app.value).cron for app in base.app)


def _app(base: Config, type_name: str) -> TypedMessage:
    """The app of this type; a missing one is added."""
    return next((app for app in base.app if app.type == type_name), None) or base.app.add(type=type_name)


def _override_log(log: xray_pb2.LogConfig) -> Shown:
    """Send logs to the console, so that the core writes no file that a controller names.

    Access lines are always on and unmasked: the node attributes connections by them.
    """
    try:
        shown = Shown(bool(log.access_log_type), Mask.of(log.mask_address))
    except BadMask as error:
        raise InvalidConfig(str(error)) from error
    log.error_log_path = log.access_log_path = log.mask_address = ""
    log.error_log_type = _CONSOLE if log.error_log_type else 0
    log.access_log_type = _CONSOLE
    # Lines about the DNS are access lines, too.
    log.enable_dns_log = log.enable_dns_log and shown.access
    return shown


def _count(policy: xray_pb2.PolicyConfig, inbounds: bool) -> None:
    for level in {0, *policy.level}:
        stats = policy.level[level].stats
        stats.user_uplink = stats.user_downlink = stats.user_online = True
    system = policy.system.stats
    system.inbound_uplink = system.inbound_downlink = inbounds
    system.outbound_uplink = system.outbound_downlink = True
