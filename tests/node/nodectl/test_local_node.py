"""The node on this machine: its settings, cores, certificate and keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from drivers.install.releases import XRAY, XRAY_BUILDABLE, InstallError
from node.base import env_file
from node.keys import manage as keys
from node.keys.keyfile import Scope
from node.nodectl import local_node
from node.nodectl.app import main
from node.nodectl.commands import core, credentials, start
from node.nodectl.output import Unusable
from node.nodectl.session import Session

MINE = {"STATE_DIR": "", "API_KEYS_FILE": "", "SSL_CERT_FILE": "", "SSL_SANS": "", "NODECTL_NODES": ""}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a node, isolated from the machine's settings and cores."""
    monkeypatch.chdir(tmp_path)
    for name in MINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(XRAY.variable("EXECUTABLE_PATH"), raising=False)
    monkeypatch.delenv("SING_BOX_EXECUTABLE_PATH", raising=False)
    monkeypatch.setenv("TXNODE_CORES", str(tmp_path / "cores"))
    monkeypatch.setenv("PATH", os.defpath)
    (tmp_path / "var").mkdir(mode=0o700)
    return tmp_path


def ctl(*words: str, code: int = 0) -> Result:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == code, done.output
    return done


def installed(directory: Path, version: str) -> Path:
    """An executable that reports to be this version of Xray."""
    path = directory / "xray"
    directory.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho Xray {version}\n")
    path.chmod(0o755)
    return path


# Settings


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "A=/x\n"),
        ("B=1\n", "B=1\nA=/x\n"),
        ("B=1", "B=1\nA=/x\n"),
        ("# A=0\nA=1\nB=2\n", "# A=0\nA=/x\nB=2\n"),
        ("A=1\nA=2\n", "A=1\nA=/x\n"),
        ("export A='1' # one\n", "A=/x\n"),
    ],
)
def test_writing_one_setting(before: str, after: str) -> None:
    """It is appended, or replaces the last occurrence; comments and other settings stay."""
    assert local_node.with_setting(before, "A", "/x") == after


def test_a_written_setting_is_read_back(tmp_path: Path) -> None:
    """Also with spaces and hashes; the mode of the file stays."""
    file = tmp_path / ".env"
    for value in ("/a b", "/a#b", "/a #b"):
        local_node.write_setting(file, "A", value)
        assert env_file.read(file.read_text()) == {"A": value}
    file.chmod(0o640)
    local_node.write_setting(file, "A", "/b")
    assert file.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ValueError, match="cannot be written"):
        local_node.write_setting(file, "A", "a\nB=1")


def test_links_in_a_directory_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write there: the target of a link is neither changed nor copied into a file of that user."""
    other, file = tmp_path / "other", tmp_path / ".env"
    other.write_text("SECRET=1\n")
    other.chmod(0o600)
    file.symlink_to(other)
    with pytest.raises(ValueError, match=r"is a link to .*other"):
        local_node.write_setting(file, "A", "/b")
    assert file.is_symlink() and other.read_text() == "SECRET=1\n"
    file.unlink()
    file.write_text("A=1\n")
    file.chmod(0o666)
    replace = Path.replace

    def swapped(self: Path, target: Path) -> Path:
        """As the directory's owner may do at any moment."""
        replace(self, target)
        target.unlink()
        target.symlink_to(other)
        return target

    monkeypatch.setattr(Path, "replace", swapped)
    local_node.write_setting(file, "A", "/b")
    assert other.stat().st_mode & 0o777 == 0o600


def test_settings_of_strangers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory like /tmp, programs and nodes in another user's settings are neither run nor called."""
    script = place / "xray"
    script.write_text(f"#!/bin/sh\ntouch {place}/run\n")
    script.chmod(0o755)
    (place / ".env").write_text(f"{XRAY.variable('EXECUTABLE_PATH')}={script}\n")
    owners = {place: 0, place / ".env": 12345, place / "var": 0}
    monkeypatch.setattr(local_node, "owner", owners.__getitem__)
    for words in (("core", "list"), ("info",), ("key", "list"), ("doctor",)):
        assert "another user's" in ctl(*words, code=2).output
    assert not (place / "run").exists()
    (place / ".env").unlink()
    owners[place / "var"] = 12345
    assert "another user's" in ctl("info", code=2).output
    owners[place] = 12345
    assert "another user's" not in ctl("info", code=2).output


def test_which_settings_are_read(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Those of the directory; if it has none, those of the service."""
    service = tmp_path_factory.mktemp("etc") / "node.env"
    service.write_text("API_KEYS_FILE=/srv/keys\n")
    monkeypatch.setattr(local_node, "SERVICE_SETTINGS", service)
    assert local_node.find(place, {}).keys == place / "var/api_keys"
    (place / ".env").write_text("STATE_DIR=state\n")
    assert local_node.find(place, {}).keys == place / "state/api_keys"
    elsewhere = local_node.find(service.parent, {})
    assert (elsewhere.keys, elsewhere.service, elsewhere.file) == (Path("/srv/keys"), True, service)
    # The directory /var is no node's.
    assert local_node.find(Path("/"), {}).service
    assert (elsewhere.state, core.directory_of(elsewhere)) == (Path("/var/lib/txnode"), Path("/opt/txnode/cores"))


def test_an_instance_of_the_unit(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    """`--node two` is the node of node@two, also for commands that take no `--node`; a node of the file comes first."""
    etc = tmp_path_factory.mktemp("etc")
    monkeypatch.setattr(local_node, "SERVICE_SETTINGS", etc / "node.env")
    for name in ("node", "local", "two", "Two", "berlin"):
        (etc / f"{name}.env").write_text(f"API_KEYS_FILE={etc}/{name}.keys\n")
    found = local_node.instance("two")
    assert found is not None and (found.keys, found.file) == (etc / "two.keys", etc / "two.env")
    assert (found.state, core.directory_of(found)) == (Path("/var/lib/txnode-two"), Path("/opt/txnode/cores"))
    assert not any(map(local_node.instance, ("node", "local", "Two", "three", "../etc/two", "")))
    file = place / "nodes.toml"
    file.write_text("[nodes.berlin]\n")
    for name, known in (("two", etc / "two.keys"), ("berlin", place / "var/api_keys"), ("two,berlin", None)):
        session = Session(file, named=tuple(name.split(",")))
        assert session.local_node.keys == (known or place / "var/api_keys")
    ctl("--nodes", str(file), "--node", "two", "key", "new", "panel")
    assert keys.keys(etc / "two.keys") and not (place / "var/api_keys").exists()
    assert "has no node three" in ctl("--nodes", str(file), "info", "--node", "three", code=2).output
    assert "/var/lib/txnode-two" in ctl("doctor", "--node", "two", code=1).output


def holding(state: Path, directory: Path, **environment: str) -> subprocess.Popen[bytes]:
    """A process that locks this state directory, as a node does; returns when it has the lock."""
    program = "import fcntl, sys\nlock = open(sys.argv[1], 'w')\nfcntl.flock(lock, fcntl.LOCK_EX)\nprint(flush=True)\n"
    words = [sys.executable, "-c", f"{program}sys.stdin.read()", str(state / "lock")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=directory, env=environment)
    assert process.stdout is not None and process.stdout.readline()
    return process


SHARED = {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt", "SSL_KEY_FILE": "/none", "DEBUG": "express:*"}


def test_settings_of_a_running_node(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its own environment counts: names in the shell's may be meant for others. Paths are relative to its directory."""
    own = tmp_path_factory.mktemp("node")
    shell = {**SHARED, "STATE_DIR": str(place / "var")}
    given = {"STATE_DIR": str(place / "var"), "SSL_CERT_FILE": "pair/one.pem", "SSL_KEY_FILE": "pair/one.key"}
    with holding(place / "var", own, **given) as node:
        found = local_node.find(place, shell)
        assert (found.directory, found.file) == (own, own / ".env")
        assert credentials.file_of(found) == own / "pair/one.pem" and "DEBUG" not in found.values
        node.kill()
    with holding(place / "var", own) as other:
        assert local_node.find(place, shell).directory == place
        other.kill()
    assert local_node.find(place, shell).directory == place


def test_the_key_of_a_running_node(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A node hides the key that it has from its environment: the shell's counts, if there is one."""
    own, state = tmp_path_factory.mktemp("node"), str(place / "var")
    with holding(place / "var", own, STATE_DIR=state, API_KEY=" " * 36) as node:
        shell = {"STATE_DIR": state, "API_KEY": "0123456789abcdef"}
        assert local_node.find(place, shell).values["API_KEY"] == shell.pop("API_KEY")
        with pytest.raises(Unusable, match="API_KEY: the node has it from its environment, and hides it there: set it"):
            local_node.local_target(place, shell)
        node.kill()
    with holding(place / "var", own, STATE_DIR=state, API_KEY="fedcba9876543210") as node:
        assert local_node.find(place, {"API_KEY": "0123456789abcdef"}).values["API_KEY"] == "fedcba9876543210"
        node.kill()


def test_the_doctor_checks_the_nodes_own_certificate(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no node runs: the pair in STATE_DIR, whatever SSL_CERT_FILE is in the shell."""
    for name, value in SHARED.items():
        if name != "DEBUG":
            monkeypatch.setenv(name, value)
    (place / ".env").write_text("API_KEY=0123456789abcdef\nSTATE_DIR=state\n")
    ctl("certificate", "make", "--san", "node1.example.com")
    [answer] = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    found = {finding["name"]: (finding["level"], finding["found"]) for finding in answer["result"]}
    assert found["settings"][0] == "ok" and found["certificate"] == ("ok", "certificate and key match")
    assert found["certificate-names"][0] == "ok" and "node1.example.com" in found["certificate-names"][1]


# Cores


def test_listing_and_choosing_cores(place: Path) -> None:
    """The list has known, installed and used releases; `use` writes the setting, for the next start."""
    old = installed(place / f"cores/xray-{XRAY_BUILDABLE.release}", XRAY_BUILDABLE.version)
    own = installed(place / "own", "99.1.1")
    rows = json.loads(ctl("core", "list", "--json").stdout)
    used = [row for row in rows if row["used"]]
    assert [(row["release"], row["path"], row["pinned"]) for row in used] == [(XRAY_BUILDABLE.release, str(old), False)]
    assert [row["release"] for row in rows if row["pinned"] and row["core"] == "xray"] == [XRAY.release]
    assert ctl("core", "use", "xray", str(own)).stdout == f"XRAY_EXECUTABLE_PATH={own}\n"
    (place / ".env").write_text("API_KEY=0123456789abcdef\n")
    assert ctl("core", "use", "xray", str(own), "--print").stdout == f"XRAY_EXECUTABLE_PATH={own}\n"
    ctl("core", "use", "xray", str(own))
    assert env_file.read((place / ".env").read_text()) == {
        "API_KEY": "0123456789abcdef",
        "XRAY_EXECUTABLE_PATH": str(own),
    }
    rows = json.loads(ctl("core", "list", "--json").stdout)
    assert [(row["release"], row["path"]) for row in rows if row["used"]] == [("99.1.1", str(own))]
    ctl("core", "use", "xray", XRAY_BUILDABLE.release)
    assert f"XRAY_EXECUTABLE_PATH={old}\n" in (place / ".env").read_text()


def test_cores_that_cannot_be_used(place: Path) -> None:
    """The error says that it is not installed, missing or not this core, and no setting is written."""
    (place / ".env").write_text("")
    assert "is not installed: nodectl core install xray" in ctl("core", "use", "xray", XRAY.release, code=1).output
    assert "neither a release of xray" in ctl("core", "use", "xray", "9", code=1).output
    assert "is not Xray" in ctl("core", "use", "xray", "/bin/true", code=1).output
    assert "no digest of" in ctl("core", "install", "xray", "--version", "9", code=1).output
    assert (place / ".env").read_text() == ""


def test_installing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed core is kept; `update` installs the pinned release, and prints how to have the node run it."""
    old = installed(place / f"cores/xray-{XRAY_BUILDABLE.release}", XRAY_BUILDABLE.version)
    assert ctl("core", "install", "xray").stdout == f"{old}\n"
    assert ctl("core", "install", "xray", "--version", XRAY_BUILDABLE.release).stdout == f"{old}\n"
    monkeypatch.setenv("XRAY_DOWNLOAD_URL", "http://127.0.0.1:1/")
    assert "cannot install" in ctl("core", "update", "xray", code=1).output
    new = installed(place / f"cores/xray-{XRAY.release}", XRAY.version)
    done = ctl("core", "update", "xray")
    assert done.stdout == f"{new}\n" and "restart the node" in done.stderr
    (place / ".env").write_text(f"XRAY_EXECUTABLE_PATH={old}\n")
    assert f"nodectl core use xray {new}" in ctl("core", "update", "xray").stderr
    assert issubclass(InstallError, Exception)


# The certificate


def test_certificate(place: Path) -> None:
    """It is made once, shown whole, and replaced only with --force; the key is never printed."""
    assert "nodectl certificate make" in ctl("certificate", "show", code=2).output
    (place / ".env").write_text("SSL_SANS=one.example, 192.0.2.7\n")
    ctl("certificate", "make", "--san", "node.example")
    file, key = place / "var/certificate.pem", place / "var/key.pem"
    found = json.loads(ctl("certificate", "show", "--json").stdout)
    assert found["names"][:3] == ["node.example", "one.example", "192.0.2.7"]
    assert (found["pem"], found["file"], found["days_left"] > 3600) == (file.read_text(), str(file), True)
    shown = ctl("certificate", "show").stdout
    assert shown.endswith(file.read_text()) and found["sha256"] in shown and "PRIVATE" not in shown
    before = file.read_bytes(), key.read_bytes()
    assert "--force" in ctl("certificate", "make", code=2).output
    assert "neither a host name" in ctl("certificate", "make", "--force", "--san", "a b", code=2).output
    assert (file.read_bytes(), key.read_bytes()) == before
    ctl("certificate", "make", "--force")
    after = x509.load_pem_x509_certificate(file.read_bytes())
    assert file.read_bytes() != before[0] and key.read_bytes() != before[1]
    assert key.stat().st_mode & 0o777 == 0o600 and after.subject.rfc4514_string()


def test_no_secret_is_copied_where_a_certificate_is_made(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Root may make one in another user's directory, where the key is a link to a file of root."""
    secret = tmp_path_factory.mktemp("root") / "shadow"
    secret.write_text("root's")
    ctl("certificate", "make")
    file, key = place / "var/certificate.pem", place / "var/key.pem"
    key.unlink()
    key.symlink_to(secret)
    (place / ".env").write_text("SSL_SANS=a b\n")
    ctl("certificate", "make", "--force", code=2)
    assert key.is_symlink() and file.is_file() and set((place / "var").iterdir()) == {file, key}
    (place / ".env").unlink()
    ctl("certificate", "make", "--force")
    assert not key.is_symlink() and secret.read_text() == "root's"


def test_another_certificate(place: Path) -> None:
    """The one in the settings is shown, or a given file."""
    ctl("certificate", "make", "--dir", str(place / "other"))
    other = place / "other/certificate.pem"
    assert str(other) in ctl("certificate", "show", "--file", str(other)).stdout
    ctl("certificate", "make")
    (place / ".env").write_text(f"SSL_CERT_FILE={other}\n")
    assert json.loads(ctl("certificate", "show", "--json").stdout)["file"] == str(other)
    other.write_text("x")
    assert "is not a certificate" in ctl("certificate", "show", code=2).output


# Keys


def test_keys(place: Path) -> None:
    """A key is printed once; the file has only its digest, and the list has no secret."""
    key = ctl("key", "new", "ops", "--scope", "read").stdout.strip()
    made = json.loads(ctl("key", "new", "panel", "--json").stdout)
    assert made["scope"] == "all" and made["key"] != key
    file = place / "var/api_keys"
    assert key not in file.read_text() and "sha256:" in file.read_text()
    assert [(found.name, found.scope) for found in keys.keys(file)] == [("ops", Scope.READ), ("panel", Scope.ALL)]
    assert json.loads(ctl("key", "list", "--json").stdout)[0] == {"name": "ops", "scope": "read"}
    ctl("key", "revoke", "ops")
    assert ctl("key", "list").stdout.split() == ["name", "scope", "panel", "all"]
    assert "has no key ops" in ctl("key", "revoke", "ops", code=2).output
    assert "two keys with the name panel" in ctl("key", "new", "panel", code=2).output
    assert "a name has" in ctl("key", "new", "a b", code=2).output
    other = place / "other"
    other.write_bytes(b"\xff")
    assert str(other) in ctl("key", "list", "--keys", str(other), code=2).output


def test_deep_configuration() -> None:
    with pytest.raises(Unusable, match="give --core"):
        start.detect("[" * 200_000)
