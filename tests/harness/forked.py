"""Nodes that are copies of one interpreter, which has imported already what takes a node most of its start.

What a test sees is the same: a process of its own, in a session of its own, with the environment, the directory and the
output that it is given. How a node starts from nothing has tests of its own, which do not use this.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import TimeoutExpired

from scripts.staging.process import Child, Running

# What `node.tap` imports, but for the reactor (Klein has it): copies would have one epoll descriptor together.
_IMPORTED = (
    "twisted.scripts.twistd",
    "drivers.sing_box.driver",
    "drivers.xray.driver",
    "node.api.keyring",
    "node.api.operations",
    "node.door.tls",
    "node.log_lines",
    "node.metrics.figures",
    "node.metrics.pages",
    "node.settings",
    "node.transport.rpc",
    "node.transport.site",
    "werkzeug.routing",
)
# What the interpreter that is copied had from ours; what its imports add to the environment is not among it.
_INHERITED = frozenset(os.environ)
_ROOT = str(Path(__file__).parents[2])
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__, *_IMPORTED])


class Forked(Child):
    """Runs `twistd` as a copy; another program, or what is to import other modules than ours, as `Child` does."""

    def _run(self, argv: Sequence[str], environment: Mapping[str, str], directory: Path | None) -> Running:
        if Path(argv[0]).name != "twistd" or environment.get("PYTHONPATH") != _ROOT:
            return super()._run(argv, environment, directory)
        return _Copy(list(argv), dict(environment), directory or Path.cwd())


class _Copy:
    """Satisfies `Running`. Nobody writes to its standard input, which is /dev/null."""

    def __init__(self, argv: list[str], environment: dict[str, str], directory: Path) -> None:
        output, its_own = _processes.Pipe(duplex=False)
        arguments = argv, environment, directory, its_own
        self._process = _processes.Process(target=_become, args=arguments, daemon=True)
        self._process.start()
        its_own.close()
        self._argv = argv
        # Who asks at the same time as another one could be told of a status that is none.
        self._asking = threading.Lock()
        self.stdin = BytesIO()
        self.stdout = os.fdopen(os.dup(output.fileno()), "rb")
        output.close()

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def poll(self) -> int | None:
        with self._asking:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise TimeoutExpired(self._argv, timeout or 0)
        return status

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _become(argv: list[str], environment: dict[str, str], directory: Path, output: Connection) -> None:
    """Go on as a `twistd` that was just executed."""
    assert "twisted.internet.reactor" not in sys.modules
    os.setsid()
    os.chdir(directory)
    _have_only(output.fileno())
    for name in _INHERITED:
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.argv = argv
    from twisted.scripts.twistd import run

    run()


def _have_only(output: int) -> None:
    """No descriptors but the three that every process has."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate((nothing, output, output)):
        os.dup2(source, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
