"""The settings of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.backend.options import BackendOptions
from node.limits.allowance import Allowance
from node.limits.options import LimitOptions
from node.traffic.options import TrafficOptions


@dataclass(frozen=True)
class EngineOptions:
    """The settings of its rooms. `count_users`: bytes are summed up by user, too."""

    backend: BackendOptions = field(default_factory=BackendOptions)
    traffic: TrafficOptions = field(default_factory=TrafficOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    quota: Allowance = field(default_factory=Allowance)
    count_users: bool = False
