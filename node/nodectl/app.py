"""The program `nodectl`: its commands, each loaded when it is called."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import click

from node import __version__
from node.nodectl.exits import Exit
from node.nodectl.options import options

# Each command and its line in the help; it is in the module of its name in `node.nodectl.commands`, as `command`.
COMMANDS: dict[str, str] = {
    "info": "What each node is and runs.",
    "start": "Run a configuration with users.",
    "stop": "End what runs.",
    "users": "Who may use it and who is in: list, add, change, remove, diff, sync.",
    "stats": "Bytes of users, inbounds, outbounds; figures of the machine and the core.",
    "online": "Who is connected, and from where.",
    "logs": "Log lines of the core and the node.",
    "top": "A live screen: the machine, and its busiest users.",
    "doctor": "What commonly goes wrong here or on a node, and what to do about it.",
    "update": "Other versions while a node serves: core, geo, node.",
    "jobs": "What became of updates.",
    "core": "The cores of this machine: install, list, use, update.",
    "certificate": "The certificate of this machine's node: show, make.",
    "key": "Keys of this machine's node: new, list, revoke.",
    "completion": "What a shell needs to complete nodectl.",
}


class Commands(click.Group):
    """Loads the module of a command that is called, and no other."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(f"node.nodectl.commands.{cmd_name.replace('-', '_')}").command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Ctrl-C is no error of anybody's: nothing is said, and the code tells."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(Exit.INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@partial(options, envvar="NODECTL_NODES")
@click.version_option(__version__, prog_name="nodectl", message="%(prog)s %(version)s")
def main() -> None:
    """Operates nodes: the one on this machine, or those of a file of nodes (docs/nodectl.md)."""
