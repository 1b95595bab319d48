"""Available memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.machine import memory

MIB = 1024**2


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of control groups; this process is in the root group."""
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    enter(tmp_path, monkeypatch, "/")
    return tmp_path


def enter(groups: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    own = groups / "own"
    own.write_text(f"4:memory:/elsewhere\n0::{path}\n")
    monkeypatch.setattr(memory, "_OWN", own)


def limited(group: Path, most: int | str = "max", high: int | str = "max") -> None:
    """The group uses 40 MiB, and 50 MiB for inactive files, which count as free."""
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.high").write_text(f"{high}\n")
    (group / "memory.current").write_text(f"{90 * MIB}\n")
    (group / "memory.stat").write_text(f"anon {40 * MIB}\ninactive_file {50 * MIB}\nactive_file 0\n")


def test_a_container(groups: Path) -> None:
    """A container sees its own control group as the root."""
    limited(groups, 100 * MIB)
    assert memory.available() == 60 * MIB


@pytest.mark.parametrize(
    "limits",
    [
        {"a/b": {"most": 100 * MIB}},
        {"a/b": {"high": 100 * MIB, "most": 200 * MIB}},
        {"a/b": {"most": 300 * MIB}, "a": {"most": 100 * MIB}},
        {"a/b": {"most": 100 * MIB}, "a": {"most": 300 * MIB}},
    ],
)
def test_a_service(groups: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, dict[str, int]]) -> None:
    """The narrowest of the limits counts: of its own control group, or of one around it."""
    for path, some in limits.items():
        limited(groups / path, **some)
    enter(groups, monkeypatch, "/a/b")
    assert memory.available() == 60 * MIB


@pytest.mark.parametrize("where", ["", "elsewhere", "elsewhere/within"])
def test_control_groups_of_version_1(groups: Path, where: str) -> None:
    """The limit of the memory controller's own hierarchy counts, also where a container sees its group as the root."""
    (groups / "own").write_text("5:cpu,cpuacct:/other\n4:pids,memory:/elsewhere/within\n0::/\n")
    group = groups / "memory" / where
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{100 * MIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{90 * MIB}\n")
    (group / "memory.stat").write_text(f"inactive_file {MIB}\ntotal_inactive_file {50 * MIB}\n")
    assert memory.available() == 60 * MIB


@pytest.mark.parametrize("path", ["/", "/a/b", "/../../elsewhere"])
def test_no_limit(groups: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """All of the machine's memory counts; a control group that cannot be seen is ignored."""
    limited(groups)
    enter(groups, monkeypatch, path)
    assert memory.available() > 300 * MIB
