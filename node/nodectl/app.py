"""The program `nodectl`: its commands, each imported when it is called."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import click
from click.shell_completion import get_completion_class

from node import __version__
from node.nodectl.output import Exit, Unusable
from node.nodectl.session import shared

# Commands and their lines in the help. Each is the function of its name in the module of its name in
# `node.nodectl.commands`, or in that of a related command.
COMMANDS: dict[str, str] = {
    "info": "Show the state, core, versions and warnings of each node.",
    "start": "Start the core with a configuration and users.",
    "stop": "Stop the core.",
    "users": "Manage users: list, add, change, remove, drop, limits, limit, diff, sync.",
    "stats": "Show traffic of users, inbounds or outbounds, or figures of the machine or the core.",
    "bill": "Show bytes of users beside those that the machine carried, and explain the difference.",
    "online": "Show which users are connected, and from where.",
    "logs": "Print log lines of the core and the node.",
    "top": "Show a live screen: the machine and its busiest users.",
    "doctor": "Check this machine, or nodes, for common problems, and print remedies.",
    "update": "Update a running node: core, geo, node.",
    "jobs": "Show the progress and results of updates.",
    "core": "Manage the cores installed on this machine: install, list, use, update.",
    "certificate": "Show or make the certificate of the node on this machine.",
    "key": "Manage the API keys of the node on this machine: new, list, revoke.",
    "sandbox": "Run a node with a pretended core, for the tests of a controller.",
    "completion": "Print the completion script of a shell.",
}
_MODULES = {
    "info": "start",
    "stop": "start",
    "top": "stats",
    "jobs": "update",
    "online": "users",
    "certificate": "credentials",
    "key": "credentials",
}


class Commands(click.Group):
    """A group that imports only the module of the command that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS or cmd_name in self.commands:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"node.nodectl.commands.{_MODULES.get(cmd_name, cmd_name)}")
        found: click.Command = getattr(module, cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Turn Ctrl-C into its exit code, without a message."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(Exit.INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@partial(shared, envvar="NODECTL_NODES")
@click.version_option(__version__, prog_name="nodectl", message="%(prog)s %(version)s")
def main() -> None:
    """Operate proxy nodes: the one on this machine, or those in a nodes file (docs/nodectl.md)."""


@main.command
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell. For bash and zsh: eval "$(nodectl completion bash)"

    For fish: nodectl completion fish > ~/.config/fish/completions/nodectl.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    completing = kind(ctx.find_root().command, {}, "nodectl", "_NODECTL_COMPLETE")
    try:
        click.echo(completing.source())
    except RuntimeError as error:  # an old bash
        raise Unusable(str(error))
