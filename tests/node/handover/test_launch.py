"""Which processes become a keeper, and the command that it runs again: test_keeper.py has how they become it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.handover import keeper, launch
from node.handover.launch import become_keeper, interpreter, is_node, setting


@pytest.mark.parametrize(
    "words",
    [
        ["twistd", "--nodaemon", "node"],
        ["/usr/bin/twistd", "-n", "node"],
        ["twistd", "-no", "node"],
        ["twistd", "-on", "node", "--keeper", "on"],
        ["twistd", "--nodaemon", "--pidfile=", "node", "-n"],
    ],
)
def test_nodes(words: Sequence[str]) -> None:
    """twistd runs the node in its own process."""
    assert is_node(words)


@pytest.mark.parametrize(
    "words",
    [
        ["python", "-m", "twisted", "--nodaemon", "node"],
        ["trial", "--nodaemon", "node"],
        ["twistd"],
        ["twistd", "--nodaemon", "web"],
        # The node runs in a child, and is not waited for.
        ["twistd", "node"],
        ["twistd", "-o", "node"],
        ["twistd", "node", "--nodaemon"],
        ["twistd", "--no-nonsense", "node"],
        # No node runs at all.
        ["twistd", "--nodaemon", "node", "--check"],
        ["twistd", "--nodaemon", "node", "--help"],
        ["twistd", "--nodaemon", "--version", "node"],
    ],
)
def test_no_nodes(words: Sequence[str]) -> None:
    assert not is_node(words)


def test_the_setting(tmp_path: Path) -> None:
    """An option comes before the environment, and that before the file."""
    file, words = tmp_path / ".env", ["twistd", "node"]
    assert setting(words, {}, file) == ""
    file.write_text("# comment\nREST_PORT=1\nKEEPER=off\n")
    assert setting(words, {}, file) == "off"
    assert setting(words, {"KEEPER": "on"}, file) == "on"
    assert setting([*words, "--keeper", "other"], {"KEEPER": "on"}, file) == "other"
    assert setting([*words, "--keeper=other", "--debug"], {"KEEPER": "on"}, file) == "other"
    assert setting([*words, "--keeper"], {"KEEPER": "on"}, file) == ""
    # An empty value in the environment is one.
    assert setting(words, {"KEEPER": ""}, file) == ""


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """The node itself reports what is wrong with it."""
    file = tmp_path / ".env"
    file.write_bytes(b"KEEPER=off\n\xff\xff")
    assert setting([], {}, file) == setting([], {}, tmp_path) == ""


def test_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found in PATH; a link stays one, as it names the virtual environment."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert interpreter("python") == interpreter(str(link)) == str(link)
    assert interpreter("missing") == "missing"


class Executed(Exception):
    """The process would execute a keeper."""


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The commands of keepers; this process is `python bin/twistd --nodaemon node` in an empty directory."""
    found: list[Sequence[str]] = []

    def divide(words: Sequence[str]) -> None:
        found.append(words)
        raise Executed

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "divide", divide)
    monkeypatch.setattr(sys, "argv", ["bin/twistd", "--nodaemon", "node"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "bin/twistd", "--nodaemon", "node"])
    for name in (keeper.VARIABLE, launch.KEEPER):
        monkeypatch.delenv(name, raising=False)
    return found


def test_a_node_becomes_its_keeper(executed: list[Sequence[str]], tmp_path: Path) -> None:
    """The keeper runs the same command again, with paths that do not depend on the directory or on PATH."""
    with pytest.raises(Executed):
        become_keeper()
    assert executed == [[sys.executable, str(tmp_path / "bin" / "twistd"), "--nodaemon", "node"]]


@pytest.mark.parametrize("options", [["-u"], ["-u", "-W", "ignore", "-Xdev"]])
def test_options_of_the_interpreter(
    options: list[str], executed: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has them, too."""
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *options, *sys.argv])
    with pytest.raises(Executed):
        become_keeper()
    assert executed == [[sys.executable, *options, str(tmp_path / "bin" / "twistd"), "--nodaemon", "node"]]


@pytest.mark.parametrize("word", ["off", "Off", "OFF"])
def test_it_is_turned_off(word: str, executed: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In any case, as the settings read it."""
    monkeypatch.setenv(launch.KEEPER, word)
    become_keeper()
    assert not executed


def test_a_node_from_before_the_keeper(executed: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would execute this version in place of itself: this version ends, and that one goes on."""
    monkeypatch.setenv(launch.BEFORE, "7")
    with pytest.raises(SystemExit, match="restart the node"):
        become_keeper()
    assert not executed


def test_no_keeper(executed: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not if there is one, if it is turned off, or if the process is no node or was started in another way."""
    with monkeypatch.context() as inside:
        inside.setenv(keeper.VARIABLE, "3 4 5")
        become_keeper()
    with monkeypatch.context() as inside:
        inside.setenv(launch.KEEPER, "off")
        become_keeper()
    with monkeypatch.context() as inside:
        inside.setattr(sys, "argv", ["bin/twistd", "--nodaemon", "node", "--keeper=off"])
        become_keeper()
    with monkeypatch.context() as inside:
        inside.setattr(sys, "argv", ["pytest"])
        become_keeper()
    assert not executed


@pytest.mark.parametrize("words", [["python"], ["python", "-m", "twisted", "--nodaemon", "node"], ["-c", "bin/twistd"]])
def test_another_way_to_start(
    words: list[str],
    executed: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command is not known, so the node runs without a keeper, and says so."""
    monkeypatch.setattr(sys, "orig_argv", words)
    become_keeper()
    assert not executed and "the node has no keeper" in capsys.readouterr().err
