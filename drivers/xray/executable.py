"""The installed Xray: its environment, and the files that it reads, with the directory of geo files.

Deployed panels route `geoip:private` by default, and the core refuses a configuration if the file is missing: a small
geoip.dat is made then.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from drivers.install.releases import XRAY
from drivers.process.executable import ENVIRONMENT, Executable, Files, Installation
from node.base.errors import CoreFailed
from node.base.secret_file import write_secret
from node.contract.driver import Host
from protos.xray_pb2 import Cidr, GeoIp, GeoIpList

_ASSETS = "XRAY_LOCATION_ASSET"
# The files of the release archive, besides the executable and the geo files.
_DOCUMENTS = ("LICENSE", "README.md")
# The list `private` of the official geoip.dat.
PRIVATE = """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24
    192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3
    ::/127 fc00::/7 fe80::/10 ff00::/8
"""


def installation(host: Host) -> Installation:
    return Installation(host, XRAY, lambda path: _environment(host, path), assets=lambda path: _readable(host, path))


def _readable(host: Host, executable: Path) -> list[Path]:
    """The paths that the core may read geo files from: XRAY_ASSETS_PATH, the executable's directory, chosen lists.

    The executable's directory as a whole only if nothing but an installation is there, else each of its lists.
    """
    configured, chosen = host.settings.get("XRAY_ASSETS_PATH"), host.choices.lists
    places = [executable.parent, *([Path(configured)] if configured else [])]
    # A package may have installed them as links.
    found = [path.resolve() for place in places for path in _lists(place)]
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
    lists = _lists(Path(executable.spawner.environment[_ASSETS]))
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


def private_geoip() -> bytes:
    """A geoip.dat with the list `private` only."""
    networks = map(ipaddress.ip_network, PRIVATE.split())
    cidrs = [Cidr(ip=network.network_address.packed, prefix=network.prefixlen) for network in networks]
    return GeoIpList(entry=[GeoIp(country_code="PRIVATE", cidr=cidrs)]).SerializeToString()


def assets(configured: Path | None, executable: Path, private: Path, chosen: Path | None = None) -> Path:
    """The directory to use: the `configured` one, the executable's, or `private` with links to the files of both.

    `chosen` files go before those and are always linked from `private`, beside the others. A geoip.dat is written to
    `private` if none is found. Raises `OSError`.
    """
    places = chosen, configured, executable.parent
    candidates = [directory for directory in places if directory and any(_lists(directory))]
    if chosen is None and candidates and (candidates[0] / "geoip.dat").is_file():
        return candidates[0]
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = {path.name: path.resolve() for directory in reversed(candidates) for path in _lists(directory)}
    _link(wanted, private)
    own, content = private / "geoip.dat", private_geoip()
    if "geoip.dat" not in wanted and not (own.is_file() and own.read_bytes() == content):
        # Atomically: the core would take half of it, from a full disk, for the whole.
        write_secret(own, content)
    return private


def _lists(directory: Path) -> Iterator[Path]:
    return directory.glob("*.dat")


def _link(wanted: dict[str, Path], directory: Path) -> None:
    """Link these files into a directory, and remove other links."""
    for path in directory.iterdir():
        if path.is_symlink() and wanted.get(path.name) != path.readlink():
            path.unlink()
    for name, target in wanted.items():
        link = directory / name
        if not link.is_symlink():
            link.unlink(missing_ok=True)
            link.symlink_to(target)
