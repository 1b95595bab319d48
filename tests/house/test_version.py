"""The version of a clone: from its history where there is one, and else from its files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from scripts.packaging import version
from scripts.packaging.version import NUMBERED, ROOT, WRITTEN

_PARTS = st.tuples(*[st.integers(0, 10_000)] * 3)
_COMMITS = st.text("0123456789abcdef", min_size=12, max_size=12)


@pytest.mark.parametrize(
    ("newest", "since", "commit", "expected"),
    [
        ((1, 2, 3), 0, "585afc077a09", "1.2.3"),
        ((1, 2, 3), 0, "585afc077a09-dirty", "1.3.0.dev0+g585afc077a09.dirty"),
        ((1, 2, 3), 7, "585afc077a09", "1.3.0.dev7+g585afc077a09"),
        ((1, 2, 3), 7, "585afc077a09-dirty", "1.3.0.dev7+g585afc077a09.dirty"),
        (None, 41, "585afc077a09", "1.0.0.dev41+g585afc077a09"),
        (None, 41, "585afc077a09-dirty", "1.0.0.dev41+g585afc077a09.dirty"),
    ],
)
def test_each_state_of_a_clone(newest: tuple[int, int, int] | None, since: int, commit: str, expected: str) -> None:
    """At a tag, behind it, before the first one, and with changed files."""
    assert version.version("1.0.0", newest, since, commit) == expected


@pytest.mark.parametrize(
    "tag", ["v1.2", "v1.2.3.4", "v1.2.3-rc.1", "v01.2.3", "v1.v.0", "vv1.2.3", "v1.2.", "1.2.3", "v1.2.3\n", ""]
)
def test_tags_of_other_things(tag: str) -> None:
    """The tag of a release is v and three numbers; any other is left out, and is no error."""
    assert version.released(tag) is None


@given(_PARTS, st.integers(1, 100_000), _COMMITS, st.booleans())
def test_the_order_of_versions(parts: tuple[int, int, int], commits: int, commit: str, dirty: bool) -> None:
    """What is built behind a release is newer than it and all its patches, and older than the next minor release.

    Before the first release it is older than that one. pip changes nothing in the words of a version.
    """
    major, minor, patch = parts
    number = f"{major}.{minor}.{patch}"
    assert version.released(f"v{number}") == parts
    commit += "-dirty" if dirty else ""
    between = version.version(number, parts, commits, commit)
    before = version.version(number, None, commits, commit)
    assert Version(f"{major}.{minor}.{patch + 99}") < Version(between) < Version(f"{major}.{minor + 1}.0")
    assert Version(before) < Version(number)
    assert (str(Version(between)), str(Version(before))) == (between, before)


class Clone:
    """A repository with node/__init__.py of this one, below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / NUMBERED).parent.mkdir(parents=True)
        (root / NUMBERED).write_text((ROOT / NUMBERED).read_text())
        (root / ".gitignore").write_text(f"/{WRITTEN}\n")
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        own = (
            "-c",
            "user.name=A",
            "-c",
            "user.email=a@example.com",
            "-c",
            "commit.gpgsign=false",
            "-c",
            "tag.gpgsign=false",
        )
        # The settings of who runs the tests, and of a hook that does, are not for this repository.
        environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull}
        command = ["git", *own, *arguments]
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, message: str = "A change") -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", f"--message={message}")
        return self.git("rev-parse", "HEAD")[:12]

    @property
    def version(self) -> str:
        """The version that a node of this clone reports."""
        version.write(self.root)
        found: dict[str, str] = {}
        exec((self.root / WRITTEN).read_text(), found)
        return found["__version__"]


def test_a_clone_from_its_first_commit_to_the_next_release(tmp_path: Path) -> None:
    """Commits, tags and changed files give versions; tags of other things do not."""
    clone = Clone(tmp_path / "clone")
    number = version.number(clone.root)
    commit = clone.commit()
    assert clone.version == f"{number}.dev2+g{commit}"
    for other in ("v1.0.0-rc1", "v2", "v1.0.0.1", "v9.v.0", "v09.0.0", "nightly"):
        clone.git("tag", other)
    assert clone.version == f"{number}.dev2+g{commit}"
    clone.git("tag", "--annotate", "--message=1.4.2", "v1.4.2")
    assert clone.version == "1.4.2"
    (clone.root / "new").touch()
    assert clone.version == "1.4.2"
    (clone.root / NUMBERED).write_text(f"{(clone.root / NUMBERED).read_text()}#\n")
    assert clone.version == f"1.5.0.dev0+g{commit}.dirty"
    commit = clone.commit()
    assert clone.version == f"1.5.0.dev1+g{commit}"
    worktree = clone.root.with_name("worktree")
    clone.git("worktree", "add", "--quiet", "--detach", str(worktree))
    assert version.of_history(worktree) == f"1.5.0.dev1+g{commit}"


def test_after_the_merge_of_a_patch(tmp_path: Path) -> None:
    """The newest release counts, also if fewer commits lead to that of the patch."""
    clone = Clone(tmp_path / "clone")
    clone.git("tag", "v1.0.0")
    clone.git("branch", "patches")
    clone.commit()
    clone.git("tag", "v1.1.0")
    clone.git("checkout", "--quiet", "patches")
    for number in range(5):
        clone.commit(f"Patch {number}")
    clone.git("tag", "v1.0.1")
    assert clone.version == "1.0.1"
    clone.git("checkout", "--quiet", "-")
    clone.git("merge", "--quiet", "--no-ff", "--message=The patch", "patches")
    assert clone.git("describe", "--tags").startswith("v1.0.1-")
    assert clone.version == f"1.2.0.dev6+g{clone.git('rev-parse', 'HEAD')[:12]}"


def test_in_a_hook_of_another_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that git sets for it do not lead there."""
    other = Clone(tmp_path / "other")
    other.git("tag", "v7.0.0")
    clone = Clone(tmp_path / "clone")
    clone.git("tag", "v2.0.0")
    monkeypatch.setenv("GIT_DIR", str(other.root / ".git"))
    assert clone.version == "2.0.0"


def test_a_copy_without_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the number in its files, or the version that it was given; another project's history does not count."""
    around = Clone(tmp_path)
    around.git("tag", "v7.0.0")
    inner = tmp_path / "vendored" / NUMBERED
    inner.parent.mkdir(parents=True)
    inner.write_text('NUMBER = "3.2.1"\n')
    root = tmp_path / "vendored"
    version.write(root)
    assert (root / WRITTEN).read_text() == version.text_of("3.2.1")
    (root / WRITTEN).write_text(version.text_of("3.3.0.dev1+g585afc077a09"))
    version.write(root)
    assert "3.3.0.dev1" in (root / WRITTEN).read_text()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert version.of_history(around.root) is None


def test_a_version_is_written_once(tmp_path: Path) -> None:
    """The file stays as it is while the version does: Python compiles it once."""
    clone = Clone(tmp_path / "clone")
    version.write(clone.root)
    os.utime(clone.root / WRITTEN, (1, 1))
    version.write(clone.root)
    assert (clone.root / WRITTEN).stat().st_mtime == 1
    given = tmp_path / "given.py"
    version.write(clone.root, given)
    assert given.read_text() == (clone.root / WRITTEN).read_text()
