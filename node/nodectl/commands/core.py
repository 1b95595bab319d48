"""`nodectl core`: the cores of this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click

from node.nodectl import cores, setting
from node.nodectl.cores import InstallError
from node.nodectl.here import Here
from node.nodectl.options import json_option
from node.nodectl.output import note, say_json, say_table
from node.nodectl.session import Session

F = TypeVar("F", bound=Callable[..., Any])

_NAME = click.argument("name", metavar="CORE", type=click.Choice(cores.NAMES))


def _told(function: F) -> F:
    """What cannot be installed, found or written is an error of the command's."""

    @wraps(function)
    def told(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (InstallError, OSError, ValueError) as error:
            raise click.ClickException(str(error))

    return told  # type: ignore[return-value]


@click.group
def command() -> None:
    """The cores of this machine."""


@command.command("list")
@json_option
@click.pass_obj
@_told
def list_cores(session: Session) -> None:
    """Which releases are known, which are installed, and which one the node here uses when it starts a core."""
    found = list(cores.found(session.here))
    if session.json:
        say_json([vars(each) for each in found])
        return
    say_table(
        ("core", "release", "used", "pinned", "path"),
        [
            (each.core, each.release, _mark(each.used), _mark(each.pinned), each.path or "not installed")
            for each in found
        ],
    )


@command.command
@_NAME
@click.option("--version", metavar="RELEASE", help="Exactly this one, of those that `core list` names.")
@click.pass_obj
@_told
def install(session: Session, name: str, version: str | None) -> None:
    """Install a core, unless one that serves is installed; its path is printed. What is downloaded is verified."""
    click.echo(cores.install(session.here, name, version))


@command.command
@_NAME
@click.argument("which", metavar="RELEASE|PATH")
@click.option("--print", "only_print", is_flag=True, help="Write nothing: print the setting.")
@click.pass_obj
@_told
def use(session: Session, name: str, which: str, only_print: bool) -> None:
    """Have the node here use this core: a release that is installed, or an executable. It says so in its settings."""
    _use(session.here, cores.variable(name), str(cores.named(session.here, name, which)), only_print)


@command.command
@_NAME
@click.pass_obj
@_told
def update(session: Session, name: str) -> None:
    """Install the pinned release, and say how the node here comes to run it."""
    place = session.here
    path = cores.install(place, name, newest=True)
    click.echo(path)
    now = cores.used(place, name)
    if now and now[0] != path:
        note(f"the node uses {now[0]} ({now[1]}): have it use this one by nodectl core use {name} {path}")
    else:
        note("restart the node to bring it in: what runs comes back by itself")


def _use(here: Here, variable: str, path: str, only_print: bool) -> None:
    if only_print or not here.file.exists():
        click.echo(f"{variable}={path}")
        if not only_print:
            note(f"there is no {here.file}: set this where the node has its settings")
        return
    setting.write(here.file, variable, path)
    click.echo(f"{here.file}: {variable}={path}")
    if not here.service and here.environ.get(variable, path) != path:
        note(f"the environment has another {variable}, which goes before this one")
    note("restart the node to bring it in: what runs comes back by itself")


def _mark(yes: bool) -> str:
    return "yes" if yes else ""
