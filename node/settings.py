"""The node's settings, read from `.env`, the environment and options; a later source overrides an earlier one.

Each room declares its own. `all_settings` is the one list, with those that drivers declare: the options of
`twistd node`, the table in docs/settings.md and the checks are made from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from node.abuse.options import AbuseOptions
from node.backend.options import BackendOptions
from node.base import env_file
from node.base.logs import LogOptions
from node.base.settings import Options, Reading, Setting, word
from node.clock.clock import ClockOptions
from node.door.options import DoorOptions
from node.handover.options import HandoverOptions
from node.keys.keyfile import door_name
from node.keys.options import KEYS, KeyOptions
from node.limits import weights
from node.limits.allowance import Allowance
from node.limits.options import LimitOptions
from node.metrics.options import MetricsOptions
from node.state.directory import StateOptions
from node.traffic.options import TrafficOptions
from node.updates.policy import Policy

_SYSTEMD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")

Words = Mapping[str, str]


class BadSettings(Exception):
    """Some settings cannot be used; `faults` has one line for each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True)
class Settings:
    """Valid settings, by room. `cores` has the values of settings that drivers declare."""

    keys: KeyOptions = field(default_factory=KeyOptions)
    door: DoorOptions = field(default_factory=DoorOptions)
    state: StateOptions = field(default_factory=StateOptions)
    log: LogOptions = field(default_factory=LogOptions)
    backend: BackendOptions = field(default_factory=BackendOptions)
    updates: Policy = field(default_factory=Policy)
    handover: HandoverOptions = field(default_factory=HandoverOptions)
    traffic: TrafficOptions = field(default_factory=TrafficOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    quota: Allowance = field(default_factory=Allowance)
    abuse: AbuseOptions = field(default_factory=AbuseOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    clock: ClockOptions = field(default_factory=ClockOptions)
    cores: Mapping[str, str] = field(default_factory=dict)
    systemd: Mapping[str, str] = field(default_factory=dict)

    @property
    def ports(self) -> tuple[int, ...]:
        """The node's own TCP ports."""
        return tuple(filter(None, (self.door.rest_port, self.door.grpc_port, self.metrics.port)))


# The options of each room, by the field of `Settings`. In docs/settings.md those of drivers are in the middle.
ROOMS: dict[str, type[Options]] = {
    each.name: options
    for each in fields(Settings)
    if isinstance(options := cast(Any, each.default_factory), type) and issubclass(options, Options)
}
_FIRST = ("keys", "door", "state", "log")


def all_settings(drivers: Sequence[Setting] = ()) -> tuple[Setting, ...]:
    """All settings, including those of drivers."""
    first = [each for room in _FIRST for each in ROOMS[room].declared()]
    rest = [each for room, options in ROOMS.items() if room not in _FIRST for each in options.declared()]
    return (*first, *drivers, *rest)


def given(
    options: Words, directory: Path, environ: Words | None = None, drivers: Sequence[Setting] = ()
) -> dict[str, str]:
    """Return the settings that are set anywhere, by name, without checking them. `options` is by setting name.

    Raises `BadSettings` if `.env` cannot be read.
    """
    environ = os.environ if environ is None else environ
    return _explicit((_from_file(directory / ".env"), environ, options), drivers)


def load(options: Words, directory: Path, environ: Words | None = None, *, drivers: Sequence[Setting]) -> Settings:
    """Read and check the settings of this process. `options` is by setting name. Raises `BadSettings`."""
    environ = os.environ if environ is None else environ
    sources = (_from_file(directory / ".env"), environ, options)
    explicit = _explicit(sources, drivers)
    values = {setting.name: setting.default for setting in all_settings(drivers)} | explicit
    reading = Reading(values, frozenset(explicit), directory)
    state = reading.options(StateOptions)
    reading.state_dir = state.dir
    rooms: dict[str, Any] = {
        room: state if options is StateOptions else reading.options(options) for room, options in ROOMS.items()
    }
    settings = Settings(
        **rooms,
        cores={setting.name: _of_driver(reading, setting) for setting in drivers},
        systemd={name: value for name, value in environ.items() if name in _SYSTEMD},
    )
    _check_together(settings, reading)
    if reading.faults:
        raise BadSettings(reading.faults)
    if settings.door.strangers != "answer" and settings.door.name == "auto":
        return replace(settings, door=replace(settings.door, name=door_name(settings.keys.key)))
    return settings


def environment() -> MutableMapping[str, str]:
    """The process environment, for the next node process."""
    return os.environ


def keys_file(values: Words, directory: Path) -> Path:
    """The path of the file of named keys; `values` are those that are set, by setting name. Raises `BadSettings`."""
    state_dir = values.get("STATE_DIR") or next(StateOptions.declared()).default
    named = values.get("API_KEYS_FILE") or f"{state_dir}/{KEYS}"
    reading = Reading({KEYS: named}, frozenset(), directory)
    if (file := reading.value(KEYS, Path)) is None:
        raise BadSettings(reading.faults)
    return file


def _check_together(settings: Settings, reading: Reading) -> None:
    """Check settings of different rooms against each other."""
    if settings.keys.certified and not reading.values["CLIENT_CA"]:
        reading.refuse("CLIENT_CERTIFICATE", "CLIENT_CERTIFICATE: instead needs CLIENT_CA, which is not set")
    if settings.door.strangers != "answer" and settings.door.name == "auto" and not settings.keys.key:
        reading.refuse("DOOR_NAME", "DOOR_NAME: auto needs API_KEY, which is not set: set a name")
    # nodectl reads the settings of a node without those of its cores.
    by_inbound = settings.cores.get("USER_INBOUNDS", "on") == "on"
    if fault := weights.fault_of(settings.limits.weights, by_inbound):
        reading.refuse("WEIGHTS", f"WEIGHTS: {fault}")
    port = settings.metrics.port
    if port and port in (settings.door.rest_port, settings.door.grpc_port):
        reading.refuse("METRICS_PORT", f"METRICS_PORT: {port} is already the REST or gRPC port of the node")


def _of_driver(reading: Reading, setting: Setting) -> str:
    value = reading.value(setting.name, word(*setting.choices) if setting.choices else str) or ""
    if value and setting.fault is not None and (fault := setting.fault(value)):
        reading.refuse(setting.name, f"{setting.name}: {fault}")
    return value


def _explicit(sources: Iterable[Words], drivers: Sequence[Setting]) -> dict[str, str]:
    """Merge the sources, a later one over an earlier one; unknown names and empty values are dropped."""
    known = {setting.name for setting in all_settings(drivers)}
    explicit: dict[str, str] = {}
    for source in sources:
        explicit |= {name: value.strip() for name, value in source.items() if name in known and value.strip()}
    return explicit


def _from_file(path: Path) -> dict[str, str]:
    """The lines of an `.env` file, or {} without a file. Raises `BadSettings`."""
    try:
        return env_file.read(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings([f"{path} cannot be read: {error}"]) from error
