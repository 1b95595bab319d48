"""The directory of geo files: the operator's, the executable's, or the node's own with a small geoip.dat."""

from __future__ import annotations

import ipaddress
import json
import resource
from pathlib import Path

import pytest

from drivers.xray.executable import assets, private_geoip
from protos.xray_pb2 import GeoIpList
from tests.harness.convert import refuses


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """The operator's directory, the executable's and the node's own, which does not exist yet."""
    made = {name: tmp_path / name for name in ("operator", "core", "private")}
    made["operator"].mkdir()
    made["core"].mkdir()
    return made


def chosen(places: dict[str, Path], configured: bool = True) -> Path:
    return assets(places["operator"] if configured else None, places["core"] / "xray", places["private"])


def routed(address: str) -> str:
    """A configuration with a rule that uses a geo list."""
    return json.dumps({"routing": {"rules": [{"ip": [address], "outboundTag": "x"}]}})


def test_the_operators_list_first(places: dict[str, Path]) -> None:
    """The operator's geoip.dat precedes one beside the executable; nothing is written."""
    for name in ("operator", "core"):
        (places[name] / "geoip.dat").write_text(name)
    assert chosen(places) == places["operator"]
    assert chosen(places, configured=False) == places["core"]
    assert not places["private"].exists()


def test_the_executables_list_next(places: dict[str, Path]) -> None:
    """If the operator has no geo files, those beside the executable are used."""
    (places["core"] / "geoip.dat").touch()
    assert chosen(places) == places["core"]


def test_our_own_where_there_is_none(places: dict[str, Path]) -> None:
    """Without any geoip.dat the node's directory has its own, and links to the other files."""
    (places["operator"] / "geosite.dat").write_text("sites")
    (places["core"] / "extra.dat").write_text("extra")
    (places["core"] / "readme.txt").write_text("no list")
    assert chosen(places) == places["private"]
    found = {path.name: path.read_bytes() for path in places["private"].iterdir()}
    assert found == {"geoip.dat": private_geoip(), "geosite.dat": b"sites", "extra.dat": b"extra"}
    assert places["private"].stat().st_mode & 0o777 == 0o700
    assert chosen(places) == places["private"]


def test_the_operators_other_list_is_used(places: dict[str, Path]) -> None:
    """An operator with a geosite.dat and no geoip.dat gets their file, not the executable's."""
    (places["operator"] / "geosite.dat").write_text("his")
    for name in ("geoip.dat", "geosite.dat"):
        (places["core"] / name).write_text("core's")
    directory = chosen(places)
    assert (directory / "geosite.dat").read_text() == "his"
    assert (directory / "geoip.dat").read_text() == "core's"


def test_lists_that_moved(places: dict[str, Path]) -> None:
    """The links in the node's directory follow files that moved."""
    (places["operator"] / "geosite.dat").write_text("old")
    chosen(places)
    (places["operator"] / "geosite.dat").rename(places["core"] / "geosite.dat")
    (places["core"] / "geosite.dat").write_text("new")
    assert (chosen(places) / "geosite.dat").read_text() == "new"


def test_half_a_list(places: dict[str, Path]) -> None:
    """On a full disk no partial file is left, and a partial one is replaced."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            chosen(places)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(places["private"].iterdir())
    geoip = places["private"] / "geoip.dat"
    geoip.write_bytes(private_geoip()[:100])
    chosen(places)
    assert geoip.read_bytes() == private_geoip()
    (places["core"] / "geoip.dat").write_text("core's")
    (places["operator"] / "geosite.dat").touch()
    chosen(places)
    assert geoip.read_text() == "core's"


def test_what_is_private() -> None:
    """The list has loopback, link-local and private networks, IPv4 and IPv6, and no public address."""
    (entry,) = GeoIpList.FromString(private_geoip()).entry
    networks = [ipaddress.ip_network((cidr.ip, cidr.prefix)) for cidr in entry.cidr]
    assert entry.country_code == "PRIVATE"

    def known(text: str) -> bool:
        address = ipaddress.ip_address(text)
        return any(address in network for network in networks if network.version == address.version)

    for inside in (
        "10.1.2.3",
        "127.0.0.1",
        "172.31.0.1",
        "192.168.1.1",
        "169.254.1.1",
        "224.0.0.1",
        "::1",
        "fd00::1",
        "fe80::1",
    ):
        assert known(inside), inside
    for outside in ("1.1.1.1", "8.8.8.8", "172.32.0.1", "192.169.0.1", "2606:4700::1111"):
        assert not known(outside), outside


@pytest.mark.core
def test_the_core_reads_it(tmp_path: Path) -> None:
    """Without a geoip.dat the core refuses `geoip:private`; with the node's it knows that list only."""
    assert refuses(routed("geoip:private"), tmp_path)
    (tmp_path / "geoip.dat").write_bytes(private_geoip())
    assert not refuses(routed("geoip:private"), tmp_path)
    assert refuses(routed("geoip:cn"), tmp_path)
