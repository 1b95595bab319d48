"""`scripts/install --key` installs what a release key has signed, and nothing else."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.harness.signing import Signer

SCRIPT = Path(__file__).parents[2] / "scripts" / "install"
NAMES = ("fail", "from_given", "get", "from_index", "keys", "require_signed", "name_of", "unzipped")


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("keys") / "key")


def wheel(directory: Path, version: str = "1.0.1", name: str = "txnode", under: str = "") -> Path:
    """A wheel that pip would take; `under`: the file's name says this version."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"txnode-{under or version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return file


def signed(file: Path, signer: Signer, namespace: str = "txnode") -> Path:
    """Put the signature of a file beside it."""
    beside = file.with_name(f"{file.name}.sig")
    beside.write_bytes(signer.sign(file.read_bytes(), namespace))
    return beside


def gets(work: Path, values: Mapping[str, object], function: str = "from_given") -> str:
    """Run one function of the script with these variables. Returns why it failed, or "" if it has the wheel."""
    text = SCRIPT.read_text()
    found = [re.search(rf"^{name}\(\) \{{\n.*?^\}}\n", text, re.MULTILINE | re.DOTALL) for name in NAMES]
    work.mkdir()
    given = dict.fromkeys(("from", "version", "digest", "key", "signature"), "")
    given |= {name: str(value) for name, value in values.items()} | {"python": sys.executable, "work": str(work)}
    variables = "".join(f"{name}={shlex.quote(value)}\n" for name, value in given.items())
    program = f"set -eu\n{variables}{''.join(each[0] for each in found if each)}{function}\n"
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert (done.returncode == 0) == bool([*work.glob("wheel/*.whl")] and not done.stderr), done.stderr
    return done.stderr


@pytest.mark.parametrize("form", ["text", "texts", "file"])
def test_a_signed_wheel(form: str, signer: Signer, tmp_path: Path) -> None:
    """The key as on the command line, several of them, or in a file; the digest may be missing."""
    other = Signer(tmp_path / "other")
    keys = {"text": signer.public, "texts": f"{other.public},{signer.public}", "file": tmp_path / "keys"}
    (tmp_path / "keys").write_text(f"# of releases\n{other.public}\n{signer.public}\n")
    file = wheel(tmp_path / "here")
    signed(file, signer)
    assert not gets(tmp_path / "work", {"from": file, "key": keys[form]})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("nothing beside it", "sig cannot be read. Nothing is installed"),
        ("another file's", "is not signed by a key of --key: not installed"),
        ("another purpose", "is not signed by a key of --key: not installed"),
        ("another key", "is not signed by a key of --key: not installed"),
        ("an old release", "is version 1.0.0, and not what its name says: not installed"),
        ("another package", "is no wheel of txnode: not installed"),
        ("another digest", "does not have the digest"),
        ("no key", "is no ssh-ed25519 public key, and no file of them"),
    ],
)
def test_what_is_refused(wrong: str, words: str, signer: Signer, tmp_path: Path) -> None:
    """Nothing of the wheel is run before it is verified."""
    file = wheel(tmp_path / "here")
    if wrong == "an old release":
        file = wheel(tmp_path / "old", "1.0.0", under="1.0.1")
    if wrong == "another package":
        file = wheel(tmp_path / "client", name="txnode_client")
    beside = signed(file, signer, "file" if wrong == "another purpose" else "txnode")
    if wrong == "nothing beside it":
        beside.unlink()
    if wrong == "another file's":
        beside.write_bytes(signer.sign(b"another"))
    key = {"another key": Signer(tmp_path / "other").public, "no key": "ssh-rsa AAAA"}.get(wrong, signer.public)
    digest = "0" * 64 if wrong == "another digest" else ""
    assert words in gets(tmp_path / "work", {"from": file, "key": key, "digest": digest})


def test_without_a_key_the_digest_is_needed(tmp_path: Path) -> None:
    assert "--from needs --sha256" in gets(tmp_path / "work", {"from": wheel(tmp_path / "here")})
    assert "by --sha256" in gets(tmp_path / "other", {"version": "1.0.1"}, "from_index")


@pytest.mark.slow
def test_a_wheel_of_pips_index(signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signature is a file of its own."""
    file = wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(file.parent))
    (tmp_path / "sig").write_bytes(signer.sign(file.read_bytes()))
    wanted = {"version": "1.0.1", "key": signer.public}
    assert not gets(tmp_path / "work", wanted | {"signature": tmp_path / "sig"}, "from_index")
    assert "by --signature" in gets(tmp_path / "none", wanted, "from_index")
    (tmp_path / "sig").write_bytes(signer.sign(b"another"))
    assert "not signed" in gets(tmp_path / "wrong", wanted | {"signature": tmp_path / "sig"}, "from_index")


def test_a_clone_is_not_signed(signer: Signer) -> None:
    """The option promises that a release key has signed whatever gets installed."""
    done = subprocess.run([SCRIPT, "--key", signer.public], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "--key needs --from or --version" in done.stderr
