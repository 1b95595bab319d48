"""The Xray on this machine, the environment that it runs in, and the files that it reads."""

from __future__ import annotations

from pathlib import Path

from drivers.install.releases import XRAY
from drivers.process.executable import ENVIRONMENT, Executable, Files, Installation
from drivers.xray.geo import assets
from node.contract.driver import Host
from node.errors import CoreFailed

_ASSETS = "XRAY_LOCATION_ASSET"
# What is in the archive, beside the executable and the lists.
_DOCUMENTS = ("LICENSE", "README.md")


def installation(host: Host) -> Installation:
    return Installation(host, XRAY, lambda path: _environment(host, path), assets=lambda path: _lists(host, path))


def _lists(host: Host, executable: Path) -> list[Path]:
    """The operator's directory, and the lists beside the executable; all that is there where nothing else is.

    And wherever lists are that are chosen, now or next.
    """
    configured, chosen = host.settings.get("XRAY_ASSETS_PATH"), host.choices.lists
    places = [executable.parent, *([Path(configured)] if configured else [])]
    # They may be links to where a package has them.
    found = [path.resolve() for place in places for path in place.glob("*.dat")]
    directories = [Path(configured).resolve()] if configured else []
    directories += [chosen.parent] if chosen else []
    return [*found, *directories, *([executable.parent] if _is_an_installation(executable) else [])]


def _is_an_installation(executable: Path) -> bool:
    """Whether beside it there is nothing but what comes with it, so that all that will be there may be read."""
    try:
        beside = list(executable.parent.iterdir())
    except OSError:
        return False
    return all(path == executable or path.suffix == ".dat" or path.name in _DOCUMENTS for path in beside)


def files(executable: Executable, reloaded: bool) -> Files:
    """What a core reads when it starts, and not again; `reloaded`: it reads its lists again where it can."""
    lists = Path(executable.spawner.environment[_ASSETS]).glob("*.dat")
    return executable.reading(path for path in lists if not (reloaded and executable.reads_another(path)))


def _environment(host: Host, executable: Path) -> dict[str, str]:
    configured = host.settings.get("XRAY_ASSETS_PATH")
    try:
        directory = assets(
            Path(configured) if configured else None, executable, host.directory / "assets", host.choices.lists
        )
    except OSError as error:
        raise CoreFailed(f"the core cannot have its lists of addresses: {error}") from error
    splice = {} if host.settings.get("XRAY_SPLICE") == "on" else {"XRAY_BUF_SPLICE": "disable"}
    return {**ENVIRONMENT, _ASSETS: str(directory), **splice}
