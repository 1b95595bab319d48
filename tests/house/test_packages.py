"""The packages of a release are made of the wheel alone: the same bytes everywhere, and versions that sort."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from scripts.packaging import deb
from scripts.staging.wheel import wheel

SECONDS = 1_700_000_000


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.0.0", "1.0.0"),
        ("1.1.0.dev5+gabc", "1.1.0~dev5+gabc"),
        ("1.1.0.dev5+gadeb1.dirty", "1.1.0~dev5+gadeb1.dirty"),
        ("1.1.0rc1", "1.1.0~rc1"),
        ("1.1.0-beta.3", "1.1.0~beta3"),
        ("1.1.0a2.dev4", "1.1.0~a2~dev4"),
    ],
)
def test_a_version_before_a_release(version: str, expected: str) -> None:
    """It sorts before the release, and its hash stays as it is."""
    assert deb.package_version(version) == expected


@pytest.fixture
def made(tmp_path: Path) -> Path:
    file = tmp_path / "txnode-1.1.0.dev5+gabc-py3-none-any.whl"
    file.write_bytes(wheel("1.1.0.dev5+gabc"))
    return file


def test_the_same_bytes(made: Path) -> None:
    """Two runs make the same package; its files belong to root and have the given time."""
    first, second = (deb.package(made, "1.1.0.dev5+gabc", SECONDS) for _ in range(2))
    assert first == second
    for member in members(first)["data.tar"]:
        assert (member.uid, member.gid, member.mtime) == (0, 0, SECONDS)
    names = {member.name for member in members(first)["data.tar"] if not member.isdir()}
    assert names == {f"./{file.name}" for file in deb.payload(made)}


def test_its_scripts(made: Path) -> None:
    """Each is executable, and no mark of the templates is left in one."""
    scripts = deb.scripts(made.name)
    assert not [name for name, text in scripts.items() if "@WHEEL@" in text or "@INSTALLER@" in text]
    modes = {member.name: member.mode for member in members(deb.package(made, "1.1.0.dev5+gabc", 0))["control.tar"]}
    assert {modes[f"./{name}"] for name in scripts} == {0o755}


def test_the_wheel_of_another_version(made: Path) -> None:
    with pytest.raises(ValueError, match=r"not the wheel of txnode 1\.1\.0:"):
        deb.package(made, "1.1.0", SECONDS)


def members(package: bytes) -> dict[str, list[tarfile.TarInfo]]:
    """The members of the package's two archives."""
    found, rest = {}, package.removeprefix(b"!<arch>\n")
    while rest:
        name, size = rest[:16].decode().strip(), int(rest[48:58])
        if name.endswith(".tar"):
            with tarfile.open(fileobj=io.BytesIO(rest[60 : 60 + size])) as tar:
                found[name] = tar.getmembers()
        rest = rest[60 + size + size % 2 :]
    return found
