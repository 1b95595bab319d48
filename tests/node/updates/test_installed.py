"""Where the node is installed, and whether it equals a wheel."""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from node.updates import program
from node.updates.jobs import Refused
from node.updates.program import holds, installation, pack

VERSION = "1.0.0"


def modules(directory: Path, content: str = "") -> Path:
    """Make a directory with the node's modules, as in a wheel, a clone or a kept copy."""
    for package in ("node", "protos"):
        (directory / package).mkdir(parents=True)
        (directory / package / "__init__.py").write_text(content)
    return directory


def environment(directory: Path) -> Path:
    """Make modules as if installed by pip."""
    info = modules(directory) / f"txnode-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: txnode\nVersion: {VERSION}\n")
    (info / "RECORD").write_text("node/__init__.py,,\nprotos/__init__.py,,\n")
    return directory


def wheel(directory: Path, content: str = "") -> Path:
    file = directory / program.wheel_name(VERSION)
    with zipfile.ZipFile(file, "w") as archive:
        for package in ("node", "protos"):
            archive.writestr(f"{package}/__init__.py", content)
        archive.writestr(f"txnode-{VERSION}.dist-info/RECORD", "of the wheel alone")
        archive.writestr(f"txnode-{VERSION}.data/data/share/one", "which pip puts elsewhere")
    return file


def test_the_kept_copy_is_not_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a version failed, the node runs from the copy: an update still changes the environment."""
    kept, place = modules(tmp_path / "program"), environment(tmp_path / "site-packages")
    monkeypatch.setattr(sys, "path", [str(kept), str(place)])
    found, distribution = installation(kept)
    assert (found, distribution.version) == (place, VERSION)


@pytest.mark.parametrize("from_kept", [False, True])
def test_a_clone(from_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs instead of what is installed: an update would replace modules that no node runs."""
    kept, clone = modules(tmp_path / "program"), modules(tmp_path / "clone")
    place = environment(tmp_path / "site-packages")
    monkeypatch.setattr(sys, "path", [*([str(kept)] if from_kept else []), str(clone), str(place)])
    with pytest.raises(Refused, match="clone"):
        installation(kept)


def test_content_counts(tmp_path: Path) -> None:
    """All builds of a branch may have the same version."""
    place = environment(tmp_path / "site-packages")
    assert holds(place, wheel(tmp_path))
    assert not holds(place, wheel(tmp_path, "another = True"))
    (place / "protos" / "__init__.py").unlink()
    assert not holds(place, wheel(tmp_path))
    assert not holds(place, tmp_path / "none.whl")


def test_a_wheel_that_could_not_be_packed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a later rollback would install half a wheel."""
    place = environment(tmp_path / "site-packages")
    distribution = PathDistribution(place / f"txnode-{VERSION}.dist-info")
    into = tmp_path / "before"
    assert pack(distribution, into).parent == into and holds(place, next(into.iterdir()))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "write", full)
    with pytest.raises(OSError, match="No space"):
        pack(distribution, into)
    assert not into.exists()
