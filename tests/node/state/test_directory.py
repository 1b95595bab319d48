"""STATE_DIR: private, locked by one node at a time, with room for a socket's name."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar
from unittest import mock

import pytest

from node.contract.keeper import Keeper
from node.state.directory import StateDirectory, hash_name


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_private(tmp_path: Path) -> None:
    """Other users cannot access the directories and the lock, whatever the umask."""
    old = os.umask(0)
    try:
        state = StateDirectory(tmp_path / "deep" / "state")
        state.claim()
    finally:
        os.umask(old)
    assert (mode(state.path), mode(state.run_dir), mode(state.path / "lock")) == (0o700, 0o700, 0o600)
    state.stop()


def test_one_that_is_there_becomes_private(tmp_path: Path) -> None:
    """A directory that others could read is closed to them; its content stays."""
    path = tmp_path / "state"
    path.mkdir(mode=0o755)
    (path / "kept").write_text("x")
    state = StateDirectory(path)
    state.claim()
    assert mode(path) == 0o700
    assert (path / "kept").read_text() == "x"
    state.stop()


def test_two_nodes_cannot_have_it(tmp_path: Path) -> None:
    """A second node gets an error, and the directory when the first has released it."""
    first, second = StateDirectory(tmp_path), StateDirectory(tmp_path)
    first.claim()
    with pytest.raises(OSError, match="another node uses STATE_DIR"):
        second.claim()
    first.stop()
    second.claim()
    second.stop()
    second.stop()


@contextmanager
def claimed(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has claimed this directory."""
    code = (
        "import os, pathlib, sys; from node.state.directory import StateDirectory; "
        "state = StateDirectory(pathlib.Path(sys.argv[1])); state.claim(); print('mine', flush=True); os.read(0, 1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "mine\n"
        yield other
        other.kill()


def test_another_process_cannot_have_it(tmp_path: Path) -> None:
    """The lock holds between processes, and ends with a process, however that ends."""
    with claimed(tmp_path) as other:
        state = StateDirectory(tmp_path)
        with pytest.raises(OSError, match="another node"):
            state.claim()
        other.kill()
        other.wait()
    state.claim()
    state.stop()


def test_another_process_that_is_ending(tmp_path: Path) -> None:
    """A starting node waits for its end, as when the keeper was killed, and logs once that it does."""
    with claimed(tmp_path) as other:
        state = StateDirectory(tmp_path)
        # It ends only when the node waits.
        with mock.patch.object(StateDirectory, "log", info=mock.Mock(side_effect=lambda *_, **__: other.kill())) as log:
            state.start()
        assert log.info.call_count == 1
    state.stop()


def test_a_disk_that_became_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node can still lock its directory, once; its sockets go elsewhere, though access(2) allows writing."""
    opened = os.open

    def read_only(path: Path, flags: int, *mode: int) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    first, second = StateDirectory(tmp_path), StateDirectory(tmp_path)
    for _ in ("without the lock of an earlier node", "with it"):
        first.claim()
        with pytest.raises(OSError, match="another node uses STATE_DIR"):
            second.claim()
        first.stop()
        os.close(opened(tmp_path / "lock", os.O_CREAT, 0o600))
    for directory in (first.run_dir, first.door_dir):
        assert not directory.is_relative_to(tmp_path)
        directory.rmdir()


def test_a_lock_of_the_node_before(tmp_path: Path) -> None:
    """It is used for the same directory; for another one, which the operator has set since, it is not."""
    first, second, stranger = (
        StateDirectory(tmp_path / "a"),
        StateDirectory(tmp_path / "a"),
        StateDirectory(tmp_path / "b"),
    )
    first.claim()
    second.claim(os.dup(first.lock))
    first.stop()
    stranger.claim(os.dup(second.lock))
    assert os.path.samestat(os.fstat(stranger.lock), (tmp_path / "b" / "lock").stat())
    third = StateDirectory(tmp_path / "b")
    with pytest.raises(OSError, match="another node uses STATE_DIR"):
        third.claim()
    second.stop()
    stranger.stop()


@pytest.mark.parametrize("long", [False, True], ids=["", "long TMPDIR"])
def test_a_long_path_has_its_sockets_elsewhere(tmp_path: Path, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a socket's path would be too long, the sockets go to a private directory with a short name."""
    if long:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 100)))
    state = StateDirectory(tmp_path / ("x" * 100))
    state.claim()
    try:
        for directory in (state.run_dir, state.door_dir):
            assert len(os.fsencode(directory)) + 40 <= 107
            assert state.path not in directory.parents
            assert mode(directory) == 0o700
        other = StateDirectory(tmp_path / ("y" * 100))
        assert len({state.run_dir, state.door_dir, other.run_dir, other.door_dir}) == 4
    finally:
        state.stop()
        state.run_dir.rmdir()
        state.door_dir.rmdir()


def test_a_short_path_has_its_sockets_inside() -> None:
    """Else they are in STATE_DIR itself."""
    with TemporaryDirectory() as directory:
        path = Path(directory).resolve()
        assert StateDirectory(path).run_dir == path / "run"
        assert StateDirectory(path).door_dir == path / "door"


def test_a_planted_run_directory_is_refused(tmp_path: Path) -> None:
    """A link planted where the sockets would go is not followed."""
    state = StateDirectory(tmp_path / ("x" * 100))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o755)
    state.run_dir.symlink_to(elsewhere)
    try:
        with pytest.raises(OSError, match="is not a directory"):
            state.claim()
        assert mode(elsewhere) == 0o755
    finally:
        state.run_dir.unlink()


def test_a_linked_directory_is_fine(tmp_path: Path) -> None:
    """STATE_DIR itself may be a link, as systemd makes it for a dynamic user."""
    (tmp_path / "private").mkdir(mode=0o755)
    (tmp_path / "state").symlink_to(tmp_path / "private")
    state = StateDirectory(tmp_path / "state")
    state.claim()
    assert mode(tmp_path / "private") == 0o700
    state.stop()


def test_a_file_in_its_place(tmp_path: Path) -> None:
    """A file where the directory should be is an error, and is not overwritten."""
    (tmp_path / "state").write_text("x")
    with pytest.raises(OSError, match="state"):
        StateDirectory(tmp_path / "state").claim()
    assert (tmp_path / "state").read_text() == "x"


def test_names_of_paths() -> None:
    """Each path has its own short name."""
    assert hash_name(Path("/a")) == hash_name(Path("/a"))
    assert hash_name(Path("/a")) != hash_name(Path("/b"))
    assert len(hash_name(Path("/a"))) == 12


def test_the_lock_is_held_for_the_next_node(tmp_path: Path) -> None:
    """The keeper has it when the node has started, and the next node goes on with it."""

    class Holding(Keeper):
        held: ClassVar[dict[str, list[int]]] = {}

        def put(self, name: str, descriptors: Sequence[int]) -> None:
            self.held[name] = [os.dup(number) for number in descriptors]

        def take(self, name: str) -> list[int]:
            return self.held.pop(name, [])

    keeper = Holding()
    first = StateDirectory(tmp_path / "state", keeper)
    first.start()
    first.stop()
    with pytest.raises(OSError, match="another node uses"):
        StateDirectory(tmp_path / "state").claim()
    second = StateDirectory(tmp_path / "state", keeper)
    second.start()
    second.stop()
    os.close(keeper.held["lock"][0])
