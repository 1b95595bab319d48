"""The doctor's checks: each fault, made on purpose, is found and has a remedy; a machine without faults is ok."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from node.certificate import ensure
from node.doctor import credentials, machine, network, running
from node.doctor.config import Inbound, read
from node.doctor.credentials import Pair
from node.doctor.findings import Check, Finding, Level
from node.doctor.machine import Machine
from node.doctor.running import Core
from protos.service_pb2 import BaseInfoResponse, Event

NOW = datetime(2026, 11, 22, tzinfo=UTC)
WELL = Machine(
    synchronised=True,
    open_files=65_536,
    conntrack=(10, 1000),
    somaxconn=4096,
    tcp_rmem=(4096, 131_072, 6_291_456),
    tcp_wmem=(4096, 16_384, 4_194_304),
    congestion="bbr",
    disk_free=10**10,
    memory_free=10**9,
    optimised=True,
)


def levels(findings: Iterable[Finding]) -> dict[Check, Level]:
    return {finding.check: finding.level for finding in findings}


def test_a_machine_without_faults() -> None:
    """Every check is ok, and none has a remedy."""
    found = list(machine.check(WELL))
    assert {finding.level for finding in found} == {Level.OK}
    assert len(found) == 9
    assert not any(finding.document["remedy"] for finding in found)
    assert list(machine.check(Machine())) == []


@pytest.mark.parametrize(
    ("fault", "check", "level"),
    [
        ({"synchronised": False}, Check.CLOCK, Level.WARN),
        ({"open_files": 20_000}, Check.FILES, Level.WARN),
        ({"open_files": 256}, Check.FILES, Level.FAIL),
        ({"conntrack": (900, 1000)}, Check.CONNTRACK, Level.WARN),
        ({"conntrack": (1000, 1000)}, Check.CONNTRACK, Level.FAIL),
        ({"somaxconn": 128}, Check.BACKLOG, Level.WARN),
        ({"tcp_rmem": (4096, 131_072, 1_000_000)}, Check.BUFFERS, Level.WARN),
        ({"tcp_wmem": (4096, 16_384, 212_992)}, Check.BUFFERS, Level.WARN),
        ({"congestion": "reno"}, Check.CONGESTION, Level.WARN),
        ({"disk_free": 50 * 1024**2}, Check.DISK, Level.WARN),
        ({"disk_free": 0}, Check.DISK, Level.FAIL),
        ({"disk_fault": "/var is mounted read-only"}, Check.DISK, Level.FAIL),
        ({"memory_free": 100 * 1024**2}, Check.MEMORY, Level.WARN),
        ({"memory_free": 10 * 1024**2}, Check.MEMORY, Level.FAIL),
        ({"optimised": False}, Check.PYTHON, Level.WARN),
    ],
)
def test_each_fault_of_a_machine(fault: dict[str, object], check: Check, level: Level) -> None:
    """It is found, and no other fault is."""
    found = list(machine.check(replace(WELL, **fault)))  # type: ignore[arg-type]
    assert {each: how for each, how in levels(found).items() if how is not Level.OK} == {check: level}
    [told] = [finding.document for finding in found if finding.check is check]
    assert told["remedy"].endswith(".")
    assert told["found"]


def made(
    end: datetime, names: list[str], begin: datetime = NOW - timedelta(days=1), subject: str = ""
) -> tuple[bytes, bytes]:
    """A certificate that expires then, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name.from_rfc4514_string(subject)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, end)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(x509.DNSName, names))), critical=False)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return pem, key.private_bytes(serialization.Encoding.PEM, *form)


@pytest.mark.parametrize(
    ("days", "names", "host", "expected"),
    [
        (365, ["box"], "", {}),
        (20, ["box"], "", {Check.EXPIRY: Level.WARN}),
        (-0.5, ["box"], "", {Check.EXPIRY: Level.FAIL}),
        (365, ["other"], "", {Check.NAMES: Level.WARN}),
        (365, ["node.example.org"], "", {}),
        (365, ["box"], "192.0.2.1", {Check.NAMES: Level.WARN}),
        (365, [], "", {Check.NAMES: Level.FAIL}),
    ],
)
def test_certificates(days: float, names: list[str], host: str, expected: dict[Check, Level]) -> None:
    """Their expiry and names."""
    pair = Pair(*made(NOW + timedelta(days=days), names), host=host, own=["box", "192.0.2.7"])
    found = levels(credentials.check(pair, NOW))
    assert {check: level for check, level in found.items() if level is not Level.OK} == expected
    assert len(found) == 4


def test_a_certificate_that_names_the_product() -> None:
    """Earlier versions made such ones: doctor says how to get another."""
    pair = Pair(*made(NOW + timedelta(days=365), ["box"], subject="CN=txnode 0123456789ab"), own=["box"])
    found = levels(credentials.check(pair, NOW))
    assert {check for check, level in found.items() if level is not Level.OK} == {Check.SUBJECT}


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    """Missing, with another certificate's key, not PEM, not valid yet, or with a key that all users may read."""
    good, key = made(NOW + timedelta(days=90), ["box"])
    _, other = made(NOW + timedelta(days=90), ["box"])
    for pair in (Pair("cert: no such file", key), Pair(good, b"no key"), Pair(good, other), Pair(b"no PEM", key)):
        assert levels(credentials.check(pair, NOW))[Check.CERTIFICATE] is Level.FAIL
    early = made(NOW + timedelta(days=90), ["box"], NOW + timedelta(days=1))
    assert levels(credentials.check(Pair(*early), NOW))[Check.EXPIRY] is Level.FAIL
    assert credentials.key_files([tmp_path / "api_key"]).level is Level.FAIL
    assert credentials.key_files([]).level is Level.OK
    mine = ensure(tmp_path, own=lambda: ["box"])
    pair = Pair(mine.certificate.read_bytes(), mine.key.read_bytes(), own=["box"])
    assert set(levels(credentials.check(pair, datetime.now(UTC))).values()) == {Level.OK}


def test_cores_and_their_files() -> None:
    """Missing, another release, one that does not run; geo files that are missing or old."""
    one = Core("one", "/one", "2.0", "2.0")
    assert levels(running.cores([one, Core("two", pinned="1.0")])) == {Check.CORE: Level.OK}
    assert levels(running.cores([Core("one", pinned="2.0")])) == {Check.CORE: Level.FAIL}
    assert levels(running.cores([replace(one, release="1.9")])) == {Check.CORE: Level.WARN}
    assert levels(running.cores([Core("one", fault="it does not run")])) == {Check.CORE: Level.FAIL}
    ages = running.geo_files({"a": None, "b": 91, "c": 2.5})
    assert [finding.level for finding in ages] == [Level.WARN, Level.WARN, Level.OK]


def test_ports_and_inbounds() -> None:
    """Free ones, those of other programs, those that do not accept, and those that a firewall blocks."""
    told = running.ports({1: "ours", 2: "free", 3: "another program has the port"})
    assert [finding.level for finding in told] == [Level.OK, Level.WARN, Level.FAIL]
    for check in (Check.INBOUNDS, Check.REALITY):
        found = list(running.reached(check, {"a": "", "b": "gone"}))
        assert [(finding.check, finding.level) for finding in found] == [(check, Level.OK), (check, Level.FAIL)]
    assert running.closed("ufw", {443}).level is Level.WARN
    assert running.closed("ufw", set()).level is Level.OK


def test_the_information_of_a_node() -> None:
    """Its state, each warning, and crashes within a day."""
    well = BaseInfoResponse(state="running")
    assert set(levels(running.node(well, [], 1e6)).values()) == {Level.OK}
    ill = BaseInfoResponse(state="failed", reason="it does not start", warnings=["one", "two"])
    events = [Event(kind="core.exited", time=1e6 - 60, text="signal 9"), Event(kind="core.exited", time=1)]
    found = list(running.node(ill, events, 1e6))
    assert [finding.level for finding in found] == [Level.FAIL, Level.OK, Level.WARN, Level.WARN, Level.WARN]
    assert found[-1].found == "1 within the last day, the last: signal 9"


def test_the_ports_of_a_configuration() -> None:
    """Inbounds of both cores' forms, their ports and ranges, and the sites of REALITY."""
    document = {
        "inbounds": [
            {"tag": "a", "port": 443, "streamSettings": {"realitySettings": {"dest": "example.org:443"}}},
            {"tag": "b", "port": "1000-1002,2000", "listen": "127.0.0.1", "protocol": "vless"},
            {"tag": "c", "listen_port": 8443, "type": "hysteria2"},
            {"tag": "d", "listen": "/run/x.sock", "port": 1},
            {"tag": "e", "port": "nonsense"},
            {"listen_port": 9, "tls": {"reality": {"handshake": {"server": "example.net", "server_port": 444}}}},
            "no inbound",
        ]
    }
    found = read(json.dumps(document))
    assert found.inbounds == (
        Inbound("a", "", (443,), False),
        Inbound("b", "127.0.0.1", (1000, 1001, 1002, 2000), False),
        Inbound("c", "", (8443,), True),
        Inbound("inbound 5", "", (9,), False),
    )
    assert found.destinations == (("example.net", 444), ("example.org", 443))
    assert read("[]") == read("{}")
    with pytest.raises(ValueError, match="line 1"):
        read("{ // a comment\n}")


def test_firewalls(tmp_path: Path) -> None:
    """ufw's rules and firewalld's zones are read; without either there is no finding."""
    assert network.closed([443], tmp_path) is None
    for name in ("ufw", "firewalld/zones"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "firewalld/zones/public.xml").write_text('<zone><port protocol="tcp" port="62050-62051"/></zone>')
    assert network.closed([443, 62051], tmp_path) == ("firewalld", {443})
    (tmp_path / "ufw/ufw.conf").write_text("ENABLED=yes\n")
    (tmp_path / "ufw/user.rules").write_text("### tuple ### allow tcp 443,62050 0.0.0.0/0 any 0.0.0.0/0 in\n")
    (tmp_path / "ufw/user6.rules").write_text("### tuple ### allow any 1000:1005 ::/0 any ::/0 in\n")
    assert network.closed([443, 1003, 62050, 62051], tmp_path) == ("ufw", {62051})
    assert network.shut([1, 2], ["any"]) == set()


def test_names_and_remedies() -> None:
    """Each check has a name of its own, and a remedy that is a sentence."""
    assert len({check.word for check in Check}) == len(Check)
    assert all(check.remedy.endswith(".") and check.wanted for check in Check)
