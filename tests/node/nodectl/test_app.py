"""The command line itself: options, wrong arguments, completion."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from node import __version__
from node.nodectl.app import COMMANDS, main
from node.nodectl.session import Session


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A nodes file with two nodes, named in the environment."""
    file = tmp_path / "nodes.toml"
    file.write_text("[nodes.alpha]\n[nodes.beta]\n")
    monkeypatch.setenv("NODECTL_NODES", str(file))
    monkeypatch.setenv("NODECTL_KEY", "0123456789abcdef")
    return file


def test_every_command_is_there() -> None:
    """Each command has its module, and the help lists it."""
    context = click.Context(main)
    assert all(main.get_command(context, name) is not None for name in COMMANDS)
    shown = CliRunner().invoke(main, ["--help"]).output
    assert all(name in shown for name in COMMANDS)
    assert __version__ in CliRunner().invoke(main, ["--version"]).output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    """`--help` works without a node or a nodes file."""
    done = CliRunner().invoke(main, [name, "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "--node", "gamma"], "it has alpha, beta"),
        (["info", "--all", "--node", "alpha"], "not both"),
        (["nothing"], "No such command"),
        (["stats", "system", "--reset"], "do not work with system"),
        (["stats", "--reset", "--watch", "1"], "not both"),
        (["logs", "--grep", "("], "--grep"),
        (["start", "/no/such/file"], "/no/such/file"),
        (["top", "--node", "alpha"], "needs a terminal"),
        (["--nodes", "/no/such/file", "info"], "/no/such/file"),
    ],
)
def test_faults_of_the_command_line(arguments: list[str], message: str, nodes: Path) -> None:
    """Each ends with 2 before any call, with a message that says what is wrong."""
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_options_before_and_after_the_command(nodes: Path) -> None:
    """Options after a command's name override those before it."""
    seen: list[Session] = []
    info = main.get_command(click.Context(main), "info")
    assert info is not None
    info = click.Command("info", params=info.params, callback=lambda: seen.append(click.get_current_context().obj))
    group = click.Group("nodectl", {"info": info}, params=main.params)
    CliRunner().invoke(group, ["--node", "alpha", "--timeout", "3", "info", "--node", "beta", "--json"])
    [session] = seen
    assert (session.named, session.timeout, session.json, session.file) == (("beta",), 3.0, True, nodes)
    assert list(session.targets()) == ["beta"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    """Each supported shell gets a completion script."""
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert "_NODECTL_COMPLETE" in done.output


@pytest.mark.parametrize(
    ("begun", "offered"),
    [
        (([], "in"), ["info"]),
        ((["info", "--node"], ""), ["alpha", "beta", "local"]),
        ((["info", "--node"], "alpha,b"), ["alpha,beta"]),
        ((["stats"], "in"), ["inbounds"]),
    ],
)
def test_what_is_completed(begun: tuple[list[str], str], offered: list[str], nodes: Path) -> None:
    """Commands, names of nodes (also after a comma) and kinds."""
    completing = ShellComplete(main, {}, "nodectl", "_NODECTL_COMPLETE")
    assert [item.value for item in completing.get_completions(*begun)] == offered
