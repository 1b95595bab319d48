"""`scripts/install --updates` and `--requested`: what the node may ask root's service for, and what follows."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from node.updates.program import NEWEST, REPORTS, REQUEST
from tests.harness.signing import Signer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install"
DEFINITIONS, _, _ = SCRIPT.read_text().partition("\nfrom='' version=''")
# The places of a server, below the current directory; the installed version is 1.10.0.
MACHINE = f"""
trap - EXIT
home=$PWD/opt current=$PWD/opt/current state=$PWD/state settings=$PWD/node.env work=$PWD/work reports=$PWD/reports
request=$PWD/state/{REQUEST} updater=$PWD/units/txnode-update updates_settings=$PWD/updates.env
wanted=$PWD/wants/node.service
manager=systemd from='' version='' digest='' key='' signature='' updates='' requested=yes new='' no_start=yes
UPDATE_URL=$PWD/offered UPDATE_KEY='ssh-ed25519 AAAA' python={shlex.quote(sys.executable)}
"""
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def server(tmp_path: Path) -> Path:
    for name in ("opt/versions/1.10.0-abc/bin", "opt/versions/1.10.0-abc/share/txnode", "offered", "state", "work"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("reports", "units", "wants"):
        (tmp_path / name).mkdir()
    installed = tmp_path / "opt" / "versions" / "1.10.0-abc"
    (installed / "bin" / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (installed / "bin" / "python").chmod(0o755)
    for name in ("txnode-update.path", "txnode-update.service"):
        (installed / "share" / "txnode" / name).write_bytes((ROOT / "deploy" / name).read_bytes())
    (installed / "share" / "txnode" / "install").touch()
    (tmp_path / "opt" / "current").symlink_to(installed)
    (tmp_path / "reports" / "result").write_text("success\n")
    return tmp_path


def runs(server: Path, program: str) -> subprocess.CompletedProcess[str]:
    words = ["sh", "-c", f"{DEFINITIONS}\n{MACHINE}\n{program}\n", str(SCRIPT)]
    return subprocess.run(words, cwd=server, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def asks(server: Path, text: bytes) -> None:
    (server / "state" / REQUEST).write_bytes(text)


READ = 'read_request; echo "<$version|$digest>"'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"1.10.1", "<1.10.1|>"),
        (b"1.10.1\n", "<1.10.1|>"),
        (f"1.11.0.dev5+g585afc077a09 {DIGEST}".encode(), f"<1.11.0.dev5+g585afc077a09|{DIGEST}>"),
        (NEWEST.encode(), "<latest|>"),
    ],
)
def test_a_request(text: bytes, found: str, server: Path) -> None:
    """It is gone before anything is done, and so is the result of the one before."""
    asks(server, text)
    assert runs(server, READ).returncode == 0
    assert (server / "reports" / "said").read_text() == f"{found}\n"
    assert not (server / "state" / REQUEST).exists() and not (server / "reports" / "result").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"newest",
        b"latest 1",
        b"../../srv/txnode",
        b"1.10.1/../../other",
        b"1.10.1;id",
        b"1.10.1 --key",
        b"1.10.1 https://127.0.0.1/",
        b"1.10.1 " + DIGEST.encode()[:-1],
        b"1.10.1 " + DIGEST.upper().encode(),
        b"1.10.1 " + DIGEST.encode() + b" 1",
        b"1.10.1\nUPDATE_URL=/srv",
        b"1.10.1\0",
        b"1.10.1\xe9",
        b"$(id)",
        b"-1",
        b"1" * 42,
        b"1" * 1_000_000,
    ],
)
def test_a_request_of_a_node_that_was_broken_into(text: bytes, server: Path) -> None:
    """It names no place, no option and no program. The report does not repeat it."""
    asks(server, text)
    assert runs(server, READ).returncode == 1
    said = (server / "reports" / "said").read_text()
    assert said == "The node asks for no version, such as 1.1.0. Nothing is installed.\n"
    assert not (server / "state" / REQUEST).exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "nothing"])
def test_a_request_that_is_no_file(kind: str, server: Path) -> None:
    """Root reads nothing through a link and waits for no writer; the request is gone, or would be read for ever."""
    request, secret = server / "state" / REQUEST, server / "secret"
    secret.write_text("1.10.1")
    if kind == "link":
        request.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(request)
    elif kind == "directory":
        (request / "below").mkdir(parents=True)
        (request / "below" / "link").symlink_to(secret)
    assert runs(server, READ).returncode == 1
    assert "asks for no version" in (server / "reports" / "said").read_text()
    assert not request.is_symlink() and not request.exists() and secret.read_text() == "1.10.1"


CHOOSE = 'from_request; echo "<$from|$digest|$key|$(basename "$new")>"'


def test_the_wheel_of_a_version(server: Path) -> None:
    """Its server and its keys are root's."""
    done = runs(server, f"version=1.10.1 digest={DIGEST}; {CHOOSE}")
    place = f"{server}/offered/txnode-1.10.1-py3-none-any.whl"
    assert done.stdout == f"<{place}|{DIGEST}|ssh-ed25519 AAAA|>\n", done.stderr
    done = runs(server, f"UPDATE_URL=https://127.0.0.1/node version=1.11.0+g1; {CHOOSE}")
    assert "<https://127.0.0.1/node/txnode-1.11.0%2Bg1-py3-none-any.whl||" in done.stdout


@pytest.mark.parametrize(
    ("latest", "found"),
    [
        ("1.10.1\n", "txnode-1.10.1-py3-none-any.whl||"),
        (f"1.10.1 {DIGEST}\n", f"txnode-1.10.1-py3-none-any.whl|{DIGEST}|"),
        (f"1.10.0 {DIGEST}\n", "|1.10.0-abc>"),
        ("1.10.1 and more\n", ""),
        (f"1.10.1 {DIGEST} more\n", ""),
        ("<html>\n", ""),
        ("latest\n", ""),
        ("../1.10.1\n", ""),
        ("", ""),
    ],
)
def test_the_newest_version(latest: str, found: str, server: Path) -> None:
    """One line with a version, and maybe the digest; of the installed one nothing is downloaded."""
    (server / "offered" / "latest").write_text(latest)
    done = runs(server, f"version=latest; {CHOOSE}")
    assert (
        (done.returncode == 0 and found in done.stdout) if found else "the newest version is not known" in done.stderr
    )


def test_a_digest_of_the_newest_version(server: Path) -> None:
    """That of the request counts, not that of the server."""
    (server / "offered" / "latest").write_text(f"1.10.1 {DIGEST}\n")
    assert f"|{'a' * 64}|" in runs(server, f"version=latest digest={'a' * 64}; {CHOOSE}").stdout


def test_no_newest_version(server: Path) -> None:
    done = runs(server, f"version=latest; {CHOOSE}")
    assert done.returncode == 1 and "latest cannot be read. Nothing is installed." in done.stderr


@pytest.mark.parametrize("named", [False, True], ids=["as the newest", "by its number"])
@pytest.mark.parametrize(
    ("asked", "installed"),
    [
        ("1.0.0", "1.0.1"),
        ("1.9.0", "1.10.0"),
        ("1.1.0rc1", "1.1.0"),
        ("1.1.0.dev3+gabcdef0", "1.1.0"),
        ("1.0", "1.0.0"),
        ("1..0", "1.0.0"),
    ],
)
def test_a_version_that_is_not_newer(asked: str, installed: str, named: bool, server: Path) -> None:
    """An old release may have a known weakness, and a valid signature; neither a server nor the node may choose it."""
    link(server, installed)
    (server / "offered" / "latest").write_text(asked)
    done = runs(server, f"version={asked if named else 'latest'}; {CHOOSE}")
    assert done.returncode == 1 and f"{asked} is not newer than {installed}, which is installed" in done.stderr


@pytest.mark.parametrize(
    ("asked", "installed"),
    [("1.10.0", "1.9.0"), ("1.1.0", "1.1.0.dev7+gabcdef0"), ("1.1.0", "1.1.0rc1"), ("2.0.0", "1.99.99")],
)
def test_a_version_that_is_newer(asked: str, installed: str, server: Path) -> None:
    link(server, installed)
    assert f"txnode-{asked}-py3" in runs(server, f"version={asked}; {CHOOSE}").stdout


def link(server: Path, installed: str) -> None:
    version = (server / "opt" / "versions" / "1.10.0-abc").rename(server / "opt" / "versions" / f"{installed}-abc")
    (server / "opt" / "current").unlink()
    (server / "opt" / "current").symlink_to(version)


RUNS = """
service=$PWD/unit new=$home/versions/1.10.1-abc template=$PWD/none
running() { [ -e runs ]; }
service_text() { cat unit.new; }
obstacle() { cmp -s unit unit.new || echo "$service changes"; }
note_current() { echo changed; }
"""


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        (("runs", "other"), "unit changes. As root, this starts it, which ends all connections: sh"),
        ((), "the service is stopped. As root, this starts it: sh"),
    ],
)
def test_what_a_request_does_not_do(there: tuple[str, ...], reason: str, server: Path) -> None:
    """It restarts no node, which would end all connections, and starts none that the operator has stopped."""
    (server / "unit").touch()
    (server / "unit.new").write_text("other" if "other" in there else "")
    for name in there:
        (server / name).touch()
    done = runs(server, f"{RUNS}\nactivate")
    assert done.returncode == 1 and reason in done.stderr and done.stderr.endswith("--version 1.10.1\n")
    assert "changed" not in done.stdout


def test_the_cores_of_a_request(server: Path) -> None:
    """Those that are here: a server of one core does not get the other."""
    assert runs(server, "present_cores").stdout == ""
    for name in ("xray-26.3.27", "xray-26.7.28", "sing-box.lock"):
        (server / "opt" / "cores" / name).mkdir(parents=True)
    assert runs(server, "present_cores").stdout == "xray\n"


def test_updates(server: Path, tmp_path: Path) -> None:
    """Units, and settings that only root may read; a later run changes them, and "off" removes all."""
    units = [*(server / "units" / f"txnode-update.{kind}" for kind in ("path", "service"))]
    wants = server / "wants" / "txnode-update.path"
    settings = server / "updates.env"
    signer = Signer(tmp_path / "signer")
    (server / "keys").write_text(f"# releases\n{KEY} maintainer\n{signer.public}\n")
    for url, key, written in (
        ("https://127.0.0.1/node/", KEY, KEY),
        ("/srv/releases", f"{KEY} maintainer,{signer.public}", f"{KEY},{signer.key}"),
        ("/srv/releases", f"{server}/keys", f"{KEY},{signer.key}"),
    ):
        done = runs(server, f"updates={url} key={shlex.quote(key)}; make_updates")
        assert done.returncode == 0 and "only with UPDATES=on" in done.stdout, done.stderr
        assert settings.read_text() == f"UPDATE_URL={url.rstrip('/')}\nUPDATE_KEY={written}\n"
        assert settings.stat().st_mode & 0o777 == 0o600
        assert [unit.read_bytes() for unit in units] == [(ROOT / "deploy" / unit.name).read_bytes() for unit in units]
        assert str(wants.readlink()) == "../txnode-update.path"
    assert runs(server, "updates=off; make_updates").returncode == 0
    assert not [path for path in (*units, wants, settings) if path.is_symlink() or path.exists()]


@pytest.mark.parametrize(
    ("url", "key", "reason"),
    [
        ("http://127.0.0.1/", KEY, "begins with https://"),
        ("releases", KEY, "begins with https://"),
        ("https://127.0.0.1/ UPDATE_KEY=", KEY, "is no address"),
        ("https://127.0.0.1/\nUPDATE_KEY=", KEY, "is no address"),
        ("https://127.0.0.1/", "ssh-rsa AAAA", "is no ssh-ed25519 public key"),
    ],
)
def test_updates_that_are_refused(url: str, key: str, reason: str, server: Path) -> None:
    done = runs(server, f"updates={shlex.quote(url)} key={shlex.quote(key)}; make_updates")
    assert done.returncode == 1 and reason in done.stderr
    assert not (server / "updates.env").exists() and not [*(server / "units").iterdir()]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--updates", "https://127.0.0.1/"], "--updates needs --key"),
        (["--updates", "https://127.0.0.1/", "--key", KEY, "--version", "1.0.1"], "--updates installs no version"),
    ],
)
def test_options_that_do_not_fit(words: list[str], reason: str) -> None:
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and reason in done.stderr


def test_the_units() -> None:
    """The node writes and reads where the units look and report; the service has the mode that reads requests."""
    path, service = ((ROOT / "deploy" / f"txnode-update.{kind}").read_text() for kind in ("path", "service"))
    assert f"PathExists=/var/lib/txnode/{REQUEST}\n" in path
    assert f"RuntimeDirectory={REPORTS.name}\nRuntimeDirectoryPreserve=yes\n" in service
    assert f">{REPORTS}/result'" in service and "share/txnode/install --requested\n" in service
    assert f"\nreports={REPORTS}\n" in DEFINITIONS and f"\nrequest=$state/{REQUEST}\n" in DEFINITIONS
