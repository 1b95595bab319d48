"""The nodes file, the node of a directory, and the key that is sent to each node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from node.certificate import ensure, ensure_api_key
from node.client import Target
from node.nodectl.local_node import local_target, name_of
from node.nodectl.nodes_file import LOCAL, parse, read, with_secrets
from node.nodectl.output import Unusable
from node.nodectl.session import Session

FILE = """
default = "one"

[nodes.one]
address = "node1.example.com"
transport = "grpc"
certificate = "one.pem"
key_file = "/keys/one"

[nodes."node2.example.com"]
port = 443
"""
FAULTS = {
    "[nodes.a]\ncolour = 1": "colour",
    "[nodes.a]\nport = 'x'": "port",
    "[nodes.a]\nport = true": "port",
    "[nodes.a]\nport = 70000": "70000",
    "[nodes.a]\ntransport = 'ssh'": "rest or grpc",
    "[nodes.'a,b']\n": "'a,b'",
    "nodes = 3": "[nodes.NAME]",
    "[nodes]\na = 3": "[nodes.NAME]",
    "default = 'b'\n[nodes.a]": "'b'",
    "other = 3": "other",
    "no toml": "line 1",
}


def test_a_nodes_file() -> None:
    """Ports default by transport, addresses to the name; paths are relative to the file."""
    nodes = parse(FILE, Path("/etc/txnode"))
    assert nodes.default == ("one",)
    assert list(nodes.targets.items()) == [
        ("one", Target("grpc", "node1.example.com", 62050, Path("/keys/one"), Path("/etc/txnode/one.pem"))),
        ("node2.example.com", Target("rest", "node2.example.com", 443, "")),
    ]


@pytest.mark.parametrize("text", FAULTS)
def test_faults_of_the_file(text: str, tmp_path: Path) -> None:
    """The error names the fault and the file."""
    file = tmp_path / "nodes.toml"
    file.write_text(text)
    with pytest.raises(Unusable) as unusable:
        read(file, needed=False)
    assert FAULTS[text] in unusable.value.message
    assert str(file) in unusable.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    """A missing default file means no nodes; a file given by name must exist."""
    assert read(tmp_path / "nodes.toml", needed=False).targets == {}
    with pytest.raises(Unusable):
        read(tmp_path / "nodes.toml", needed=True)


def test_the_node_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a clone after `scripts/run`: certificate and key are in var, whatever SSL_CERT_FILE is in the shell."""
    ensure(tmp_path / "var")
    key = ensure_api_key(tmp_path / "var" / "api_key")
    found = local_target(tmp_path, {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt", "REST_PORT": "1234"})
    assert (found.host, found.port, found.transport) == ("127.0.0.1", 1234, "rest")
    assert (found.key, found.certificate_name) == (key, "localhost")
    assert found.trust == tmp_path / "var" / "certificate.pem"
    assert key not in repr(found)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert Session().targets().keys() == {LOCAL}


def test_a_directory_without_a_node(tmp_path: Path) -> None:
    """The error says what to do."""
    with pytest.raises(Unusable) as unusable:
        local_target(tmp_path, {})
    assert "--node" in unusable.value.message


def test_a_certificate_of_another_name(tmp_path: Path) -> None:
    """nodectl calls the node on this machine by a name in its certificate."""
    made = ensure(tmp_path, ["node.example.com"], own=list)
    assert name_of(made.certificate.read_bytes()) == "node.example.com"


def called(key: str | Path, environ: Mapping[str, str], trust: Path | None = None) -> Target:
    """The target that is called, of one with this key."""
    return with_secrets("a", Target("rest", "a", 62051, key, trust), environ)


def test_which_key_is_sent(tmp_path: Path) -> None:
    """From key_file, else from the environment, else from the local settings; without a key, no call."""
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text("from the file\n")
    environ = {"NODECTL_KEY": "from the environment"}
    assert called(file, environ).key == "from the file"
    assert called("from settings", environ).key == "from the environment"
    assert called("from settings", {}).key == "from settings"
    with pytest.raises(Unusable):
        called("", {})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_file_that_others_can_read(mode: int, tmp_path: Path) -> None:
    """It is refused, and the key is not sent."""
    file = tmp_path / "key"
    file.write_text("0123456789abcdef")
    file.chmod(mode)
    with pytest.raises(Unusable) as unusable:
        called(file, {})
    assert f"chmod 600 {file}" in unusable.value.message


def test_a_file_that_is_not_a_certificate(tmp_path: Path) -> None:
    """It is refused before any call."""
    file = tmp_path / "certificate.pem"
    file.write_text("no certificate")
    with pytest.raises(Unusable):
        called("0123456789abcdef", trust=file, environ={})
