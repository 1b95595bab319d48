"""The doctor's input about the node on this machine: its settings, its cores and their geo files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from node.certificate import own_names
from node.doctor.local import Place
from node.doctor.running import Core
from node.nodectl import cores
from node.nodectl.detect_core import WITH_GEO
from node.nodectl.local_node import LocalNode
from node.settings import BadSettings, Settings, load

_GEO = ("geoip.dat", "geosite.dat")
_DAY = 86_400.0


def collect(local: LocalNode) -> Place:
    """Collect what the doctor examines of this node."""
    settings, faults = _settings(local)
    found = list(_cores(local))
    return Place(settings, faults, local.state, found, _geo(local, found), tuple(own_names()))


def _settings(local: LocalNode) -> tuple[Settings | None, list[str]]:
    try:
        return load({}, local.directory, local.environ, drivers=()), []
    except BadSettings as bad:
        return None, bad.faults


def _cores(local: LocalNode) -> Iterator[Core]:
    for name in cores.NAMES:
        try:
            used = cores.used(local, name)
        except cores.InstallError as error:
            yield Core(name, fault=str(error))
            continue
        path, release = used or ("", "")
        yield Core(name, str(path), release, cores.pinned(name))


def _geo(local: LocalNode, found: list[Core]) -> dict[str, float | None]:
    """Ages of the geo files in days, None for a missing one; empty where no installed core reads them."""
    executable = next((core.path for core in found if core.name == WITH_GEO and core.path), "")
    if not executable:
        return {}
    directory = Path(cores.assets(local, WITH_GEO) or Path(executable).resolve().parent)
    return {name: _age(directory / name) for name in _GEO}


def _age(file: Path) -> float | None:
    try:
        return (time.time() - file.stat().st_mtime) / _DAY
    except OSError:
        return None
