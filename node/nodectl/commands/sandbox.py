"""`nodectl sandbox`: a node without a core, for the tests of a controller."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from node.nodectl.output import Unusable, print_table
from node.nodectl.session import Session, json_option
from node.sandbox import HOST, Place, run
from node.settings import BadSettings

_PORT = click.IntRange(1, 65535)


@click.command
@click.option("--rest-port", type=_PORT, help="The port for REST. [default: a free one]")
@click.option("--grpc-port", type=_PORT, help="The port for gRPC. [default: a free one]")
@click.option("--quiet", is_flag=True, help="No user is connected or has traffic, unless an order on stdin says so.")
@json_option
def sandbox(session: Session, rest_port: int | None, grpc_port: int | None, quiet: bool) -> None:
    """Run a node with a pretended core on 127.0.0.1 until Ctrl-C, for the tests of a controller.

    It prints its address, ports, key and certificate when it is ready, with --json in one line. Its files are removed
    when it ends. Lines on standard input are orders, each answered by `ok` or `error: ...`: see docs/controllers.md.
    """

    def ready(place: Place) -> None:
        if session.json:
            click.echo(json.dumps(place._asdict()))
        else:
            print_table(("field", "value"), place._asdict().items())

    free = _free()
    try:
        with TemporaryDirectory(prefix="txnode-sandbox-") as directory:
            run(Path(directory), (rest_port or free[0], grpc_port or free[1]), quiet, ready, click.echo)
    except BadSettings as error:
        raise Unusable(str(error))


def _free() -> list[int]:
    """Two ports that are free now."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(2)]
