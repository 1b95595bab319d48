"""Validates a user's limits. Pure."""

from __future__ import annotations

from protos.service_pb2 import LimitAction, Limits, Quota

# The last second of the year 9999; a greater number is not in seconds.
_LAST = 253_402_300_799
_ACTIONS = frozenset(LimitAction.values())
_WAYS, _PERIODS = frozenset(Quota.Way.values()), frozenset(Quota.Period.values())


def fault_of(limits: Limits) -> str:
    """Why these limits are invalid; empty if they are valid."""
    quota = limits.bytes
    actions = limits.expires_action, limits.addresses_action, limits.abuse_action, quota.action
    if not _ACTIONS.issuperset(actions):
        return "limits: an action is neither CUT nor TELL"
    if quota.way not in _WAYS or quota.period not in _PERIODS:
        return "limits: bytes has a way or a period that this node does not know"
    if quota.reset_day > (7 if quota.period == Quota.WEEK else 31):
        return f"limits: bytes has a reset_day of {quota.reset_day}"
    for name, seconds in (("expires_at", limits.expires_at), ("bytes.since", quota.since)):
        if not 0 <= seconds <= _LAST:
            return f"limits: {name} is {seconds}, which is not a Unix time in seconds"
    return ""
