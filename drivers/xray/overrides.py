"""Override the apps of a configuration: counters on, logs to the console, the configuration's own APIs off. Pure.

Type names and numbers: Xray-core 26.3.27.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from drivers.xray.access import BadMask, Mask, Shown
from node.base.errors import InvalidConfig
from protos import xray_pb2
from protos.xray_pb2 import Config, TypedMessage

M = TypeVar("M", bound=Message)
T = TypeVar("T")

COMMANDER = "xray.app.commander.Config"
METRICS = "xray.app.metrics.Config"
STATS = "xray.app.stats.Config"
POLICY = "xray.app.policy.Config"
ROUTER = "xray.app.router.Config"
LOG = "xray.app.log.Config"
_CONSOLE = 1


def override(base: Config, count_inbounds: bool) -> Shown:
    """Turn counters on, send logs to the console and remove other APIs; all other apps stay as and where they are.

    Returns which lines the controller asked for.
    """
    kept = [app for app in base.app if app.type not in (COMMANDER, METRICS)]
    del base.app[:]
    base.app.extend(kept)
    shown = _edit(base, LOG, xray_pb2.LogConfig, _override_log)
    _edit(base, POLICY, xray_pb2.PolicyConfig, lambda policy: _count(policy, count_inbounds))
    _edit(base, ROUTER, xray_pb2.RouterConfig, lambda _: None)
    if not any(app.type == STATS for app in base.app):
        base.app.append(TypedMessage(type=STATS))
    return shown


def _edit(base: Config, type_name: str, message_type: type[M], change: Callable[[M], T]) -> T:
    """Change an app's message in place, or add the app. Returns the result of `change`."""
    app = next((app for app in base.app if app.type == type_name), None)
    if app is None:
        app = base.app.add(type=type_name)
    message = message_type.FromString(app.value)
    result = change(message)
    app.value = message.SerializeToString()
    return result


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
