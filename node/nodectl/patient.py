"""What the doctor is told of this machine's node: its settings, its cores and their files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from node.certificate import own_names
from node.doctor.local import Place
from node.doctor.running import Core
from node.nodectl import cores
from node.nodectl.here import Here
from node.nodectl.kinds import WITH_GEO
from node.settings import BadSettings, Settings, load

_GEO = ("geoip.dat", "geosite.dat")
_DAY = 86_400.0


def place(here: Here) -> Place:
    """The node of this machine."""
    settings, faults = _settings(here)
    found = list(_cores(here))
    return Place(settings, faults, here.state, found, _geo(here, found), tuple(own_names()))


def _settings(here: Here) -> tuple[Settings | None, list[str]]:
    try:
        return load({}, here.directory, here.environ, drivers=()), []
    except BadSettings as bad:
        return None, bad.faults


def _cores(here: Here) -> Iterator[Core]:
    for name in cores.NAMES:
        try:
            used = cores.used(here, name)
        except cores.InstallError as error:
            yield Core(name, fault=str(error))
            continue
        path, release = used or ("", "")
        yield Core(name, str(path), release, cores.pinned(name))


def _geo(here: Here, found: list[Core]) -> dict[str, float | None]:
    """The ages of the files in days, None for one that is missing; of none where no core reads them."""
    executable = next((core.path for core in found if core.name == WITH_GEO and core.path), "")
    if not executable:
        return {}
    directory = Path(cores.assets(here, WITH_GEO) or Path(executable).resolve().parent)
    return {name: _age(directory / name) for name in _GEO}


def _age(file: Path) -> float | None:
    try:
        return (time.time() - file.stat().st_mtime) / _DAY
    except OSError:
        return None
