"""`nodectl core`: cores installed on this machine."""

from __future__ import annotations

from typing import Any

import click

from node.nodectl import cores
from node.nodectl.cores import InstallError
from node.nodectl.local_node import write_setting
from node.nodectl.options import json_option
from node.nodectl.output import note, print_json, print_table
from node.nodectl.session import Session

_NAME = click.argument("name", metavar="CORE", type=click.Choice([*cores.PINNED]))
_RESTART = "restart the node to use it; the node starts the core again with its configuration and users"


class _Cores(click.Group):
    """A group that turns errors of installing, finding and writing into errors of the command."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (InstallError, OSError, ValueError) as error:
            raise click.ClickException(str(error))


@click.group(cls=_Cores)
def command() -> None:
    """Manage the cores installed on this machine."""


@command.command("list")
@json_option
def list_cores(session: Session) -> None:
    """List the known releases, where they are installed, and which one the node will start next."""
    found = list(cores.found(session.local_node))
    if session.json:
        print_json([vars(each) for each in found])
        return
    print_table(
        ("core", "release", "used", "pinned", "path"),
        [
            (each.core, each.release, _mark(each.used), _mark(each.pinned), each.path or "not installed")
            for each in found
        ],
    )


@command.command
@_NAME
@click.option("--version", metavar="RELEASE", help="Install exactly this release, one of those in `core list`.")
@click.pass_obj
def install(session: Session, name: str, version: str | None) -> None:
    """Install a core and print its path. An installed core that works is kept. Downloads are verified."""
    click.echo(cores.install(session.local_node, name, version))


@command.command
@_NAME
@click.argument("which", metavar="RELEASE|PATH")
@click.option("--print", "only_print", is_flag=True, help="Print the setting instead of writing it.")
@click.pass_obj
def use(session: Session, name: str, which: str, only_print: bool) -> None:
    """Have the node on this machine start this core: an installed RELEASE or the PATH of a program.

    This writes the setting into the node's file of settings.
    """
    local = session.local_node
    variable, path = cores.PINNED[name].variable("EXECUTABLE_PATH"), str(cores.named(local, name, which))
    if only_print or not local.file.exists():
        click.echo(f"{variable}={path}")
        if not only_print:
            note(f"{local.file} does not exist: put this line where the node reads its settings")
        return
    write_setting(local.file, variable, path)
    click.echo(f"{local.file}: {variable}={path}")
    if not local.service and local.environ.get(variable, path) != path:
        note(f"the environment sets {variable} to another value, which overrides this one")
    note(_RESTART)


@command.command
@_NAME
@click.pass_obj
def update(session: Session, name: str) -> None:
    """Install the pinned release, and print how to have the node on this machine run it."""
    path = cores.install(session.local_node, name, newest=True)
    click.echo(path)
    now = cores.used(session.local_node, name)
    if now and now[0] != path:
        note(f"the node is set to use {now[0]} ({now[1]}); to use this one: nodectl core use {name} {path}")
    else:
        note(_RESTART)


def _mark(yes: bool) -> str:
    return "yes" if yes else ""
