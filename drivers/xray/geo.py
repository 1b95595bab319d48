"""The directory in which Xray looks for geoip.dat and geosite.dat, and a small geoip.dat where there is none.

Deployed panels route `geoip:private` by default, and a missing file refuses the whole configuration.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from protos.xray_pb2 import Cidr, GeoIp, GeoIpList

# The private list of the official geoip.dat.
PRIVATE = """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24
    192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3
    ::/127 fc00::/7 fe80::/10 ff00::/8
"""


def private_geoip() -> bytes:
    """A geoip.dat that knows `private` and nothing else."""
    networks = map(ipaddress.ip_network, PRIVATE.split())
    cidrs = [Cidr(ip=network.network_address.packed, prefix=network.prefixlen) for network in networks]
    return GeoIpList(entry=[GeoIp(country_code="PRIVATE", cidr=cidrs)]).SerializeToString()


def assets(configured: Path | None, executable: Path, private: Path) -> Path:
    """The directory to use: the operator's, the executable's, or `private` with what either has and our geoip.dat."""
    candidates = [directory for directory in (configured, executable.parent) if directory is not None]
    for directory in candidates:
        if (directory / "geoip.dat").is_file():
            return directory
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    for directory in candidates:
        _link_lists(directory, private)
    geoip = private / "geoip.dat"
    if not geoip.is_file():
        geoip.write_bytes(private_geoip())
    return private


def _link_lists(source: Path, target: Path) -> None:
    for path in source.glob("*.dat"):
        link = target / path.name
        if not link.is_symlink() and not link.exists():
            link.symlink_to(path.resolve())
