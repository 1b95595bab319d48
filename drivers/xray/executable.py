"""The installed Xray: its environment and the files that it reads."""

from __future__ import annotations

from pathlib import Path

from drivers.install.releases import XRAY
from drivers.process.executable import ENVIRONMENT, Executable, Files, Installation
from drivers.xray.geo import assets
from node.base.errors import CoreFailed
from node.contract.driver import Host

_ASSETS = "XRAY_LOCATION_ASSET"
# The files of the release archive, besides the executable and the geo files.
_DOCUMENTS = ("LICENSE", "README.md")


def installation(host: Host) -> Installation:
    return Installation(host, XRAY, lambda path: _environment(host, path), assets=lambda path: _lists(host, path))


def _lists(host: Host, executable: Path) -> list[Path]:
    """The paths that the core may read geo files from: XRAY_ASSETS_PATH, the executable's directory, chosen lists.

    The executable's directory as a whole only if nothing but an installation is there, else each of its lists.
    """
    configured, chosen = host.settings.get("XRAY_ASSETS_PATH"), host.choices.lists
    places = [executable.parent, *([Path(configured)] if configured else [])]
    # A package may have installed them as links.
    found = [path.resolve() for place in places for path in place.glob("*.dat")]
    directories = [Path(configured).resolve()] if configured else []
    directories += [chosen.parent] if chosen else []
    return [*found, *directories, *([executable.parent] if _is_an_installation(executable) else [])]


def _is_an_installation(executable: Path) -> bool:
    """Whether the executable's directory has only the files of a release, so that all of it may be readable."""
    try:
        beside = list(executable.parent.iterdir())
    except OSError:
        return False
    return all(path == executable or path.suffix == ".dat" or path.name in _DOCUMENTS for path in beside)


def files(executable: Executable, reloaded: bool) -> Files:
    """The files that a core reads only when it starts; `reloaded`: it reads its geo files again while it runs."""
    lists = Path(executable.spawner.environment[_ASSETS]).glob("*.dat")
    return executable.reading(path for path in lists if not (reloaded and executable.reads_another(path)))


def _environment(host: Host, executable: Path) -> dict[str, str]:
    configured = host.settings.get("XRAY_ASSETS_PATH")
    try:
        directory = assets(
            Path(configured) if configured else None, executable, host.directory / "assets", host.choices.lists
        )
    except OSError as error:
        raise CoreFailed(f"geoip.dat and geosite.dat cannot be prepared for the core: {error}") from error
    splice = {} if host.settings.get("XRAY_SPLICE") == "on" else {"XRAY_BUF_SPLICE": "disable"}
    return {**ENVIRONMENT, _ASSETS: str(directory), **splice}
