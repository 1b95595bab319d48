"""How much memory is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.machine import memory

MIB = 1024**2


@pytest.mark.parametrize(("limit", "left"), [(str(100 * MIB), 60 * MIB), ("max", None)])
def test_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, left: int | None) -> None:
    """What it has in memory of files that nobody reads any more is free."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{90 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {40 * MIB}\ninactive_file {50 * MIB}\nactive_file 0\n")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    if left is not None:
        assert memory.available() == left
    else:
        assert memory.available() > 0
