"""`nodectl core`: cores installed on this machine. `drivers.install` does the work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from drivers.install.install import cores_directory, find, installed_at, version_of
from drivers.install.install import install as install_core
from drivers.install.releases import CORES, Core, choose
from drivers.install.releases import InstallError as InstallError
from node.nodectl.local_node import LocalNode, write_setting
from node.nodectl.output import note, print_json, print_table
from node.nodectl.session import Session, json_option

# The releases that are installed by default, by the names of the cores.
PINNED: Mapping[str, Core] = {name: releases[0] for name, releases in CORES.items()}
_NAME = click.argument("name", metavar="CORE", type=click.Choice([*PINNED]))
_RESTART = "restart the node to use it; the node starts the core again with its configuration and users"


class _Cores(click.Group):
    """A group that turns errors of installing, finding and writing into errors of the command."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (InstallError, OSError, ValueError) as error:
            raise click.ClickException(str(error))


@click.group(cls=_Cores)
def core() -> None:
    """Manage the cores installed on this machine."""


@core.command("list")
@json_option
def list_cores(session: Session) -> None:
    """List the known releases, where they are installed, and which one the node will start next."""
    found = list(_found(session.local_node))
    if session.json:
        print_json(found)
        return
    columns = ("core", "release", "used", "pinned", "path")
    words = {True: "yes", False: "", "": "not installed"}
    print_table(columns, [[words.get(each[name], each[name]) for name in columns] for each in found])


@core.command
@_NAME
@click.option("--version", metavar="RELEASE", help="Install exactly this release, one of those in `core list`.")
@click.pass_obj
def install(session: Session, name: str, version: str | None) -> None:
    """Install a core and print its path. An installed core that works is kept. Downloads are verified."""
    click.echo(install_core(choose(name, version), version is not None, directory_of(session.local_node)))


@core.command
@_NAME
@click.argument("which", metavar="RELEASE|PATH")
@click.option("--print", "only_print", is_flag=True, help="Print the setting instead of writing it.")
@click.pass_obj
def use(session: Session, name: str, which: str, only_print: bool) -> None:
    """Have the node on this machine start this core: an installed RELEASE or the PATH of a program.

    This writes the setting into the node's file of settings.
    """
    local = session.local_node
    variable, path = PINNED[name].variable("EXECUTABLE_PATH"), str(_named(local, name, which))
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


@core.command
@_NAME
@click.pass_obj
def update(session: Session, name: str) -> None:
    """Install the pinned release, and print how to have the node on this machine run it."""
    path = install_core(PINNED[name], True, directory_of(session.local_node))
    click.echo(path)
    now = used(session.local_node, name)
    if now and now[0] != path:
        note(f"the node is set to use {now[0]} ({now[1]}); to use this one: nodectl core use {name} {path}")
    else:
        note(_RESTART)


def directory_of(local: LocalNode) -> Path:
    """The directory of this node's cores. Raises `InstallError`."""
    named = local.values.get("TXNODE_CORES")
    return (local.directory / named).absolute() if named else cores_directory()


def used(local: LocalNode, name: str) -> tuple[Path, str] | None:
    """The executable that the node would start now, and its version. Raises `InstallError` if it is not this core."""
    core = PINNED[name]
    path = find(core, local.values.get(core.variable("EXECUTABLE_PATH")) or None, directory=directory_of(local))
    return (path, version_of(core, path)) if path else None


def _found(local: LocalNode) -> Iterator[dict[str, Any]]:
    """All known releases, and the core in use if it is not one of them. Raises `InstallError`.

    `path` is empty if the release is not installed; `pinned` is the one that is installed by default.
    """
    directory = directory_of(local)
    for name, releases in CORES.items():
        now, version = used(local, name) or (None, "")
        places = [(core.release, installed_at(core, directory)) for core in releases]
        pinned = places[0][1]
        if now is not None and now not in [path for _, path in places]:
            places.append((version, now))
        for release, path in places:
            there = str(path) if path.exists() else ""
            yield {"core": name, "release": release, "path": there, "pinned": path == pinned, "used": path == now}


def _named(local: LocalNode, name: str, which: str) -> Path:
    """The executable of an installed release, or at a path. Raises `InstallError` if it is not this core."""
    releases: Mapping[str, Core] = {core.release: core for core in CORES[name]}
    if which in releases:
        path = installed_at(releases[which], directory_of(local))
        if not path.exists():
            raise InstallError(
                f"{releases[which].label} is not installed: nodectl core install {name} --version {which}"
            )
        return path
    path = Path(which).expanduser().absolute()
    if not path.is_file():
        raise InstallError(f"{which} is neither a release of {name} ({', '.join(releases)}) nor a file")
    version_of(PINNED[name], path)
    return path
