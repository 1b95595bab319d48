"""`nodectl completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from node.nodectl.exits import Unusable

_SHELLS = ("bash", "zsh", "fish")


@click.command
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
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
