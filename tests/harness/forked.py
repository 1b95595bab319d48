"""Start nodes and nodectl as forks of one interpreter that has already imported most modules, to save time.

A test sees no difference: a separate process in its own session, with the given environment, directory and output. It
ends with the interpreter, which ends when the tests' process has ended, also by a kill.
Tests of a node's start from scratch do not use this.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from io import BytesIO
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NamedTuple

from node.handover.keeper import PR_SET_PDEATHSIG, Keeper
from scripts.staging.process import Child, Running

# What `node.tap` imports, except modules that import the reactor: forks would share its epoll.
_IMPORTED = (
    "twisted.scripts.twistd",
    "drivers.sing_box.driver",
    "drivers.xray.driver",
    "node.client.rest",
    "node.client.rpc",
    "node.api.keyring",
    "node.api.operations",
    "node.door.tls",
    "node.log_lines",
    "node.metrics.figures",
    "node.metrics.pages",
    "node.nodectl.app",
    "node.settings",
    "node.door.rpc",
    "node.door.site",
)
# The environment variables that the forked interpreter inherited from this one, without those that imports add.
_INHERITED = frozenset(os.environ)
_ROOT = str(Path(__file__).parents[2])
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__, *_IMPORTED])


class Done(NamedTuple):
    """A command's exit status and output."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """The words of each line."""
        return [line.split() for line in self.out.splitlines()]


class Forked(Child):
    """Runs `twistd` as a fork; other programs, and a `twistd` with another PYTHONPATH, as `Child` does."""

    def _run(self, argv: Sequence[str], environment: Mapping[str, str], directory: Path | None) -> Running:
        if Path(argv[0]).name != "twistd" or environment.get("PYTHONPATH") != _ROOT:
            return super()._run(argv, environment, directory)
        return _Copy(list(argv), dict(environment), directory or Path.cwd())


class _Copy:
    """A forked process; satisfies `Running`. Its standard input is /dev/null."""

    def __init__(self, argv: list[str], environment: dict[str, str], directory: Path) -> None:
        output, its_own = _processes.Pipe(duplex=False)
        arguments = argv, environment, directory, its_own
        self._process = _processes.Process(target=_become, args=arguments, daemon=True)
        self._process.start()
        its_own.close()
        self._argv = argv
        # Concurrent calls of `exitcode` could return a wrong status.
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
    """Run as a freshly executed `twistd`."""
    assert "twisted.internet.reactor" not in sys.modules
    _tie()
    _have_only(os.open(os.devnull, os.O_RDONLY), output.fileno(), output.fileno())
    _settle(environment, directory)
    sys.argv = argv
    if environment.get("KEEPER") == "off":
        _run()
    else:
        _Keeper([{}, argv]).run()


class _Keeper(Keeper):
    """Its nodes are forks of it."""

    def execute(self, words: list[str], environment: dict[str, str]) -> None:
        os.environ.update(environment)
        # As in an executed interpreter.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        code = 1
        try:
            _run()
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            else:
                code = int(end.code or 0)
        except Exception:  # noqa: BLE001 - printed; it must not go on in the fork
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _run() -> None:
    from twisted.scripts.twistd import run

    run()


def nodectl(arguments: Sequence[str], environment: Mapping[str, str], directory: Path, stdin: str) -> Done:
    """Run nodectl in a fork and wait for its end, for up to a minute. Raises `TimeoutExpired`."""
    with tempfile.TemporaryDirectory() as files:
        paths = [Path(files, name) for name in ("stdin", "stdout", "stderr")]
        for path, text in zip(paths, (stdin, "", ""), strict=True):
            path.write_text(text)
        process = _processes.Process(
            target=_become_nodectl, args=(list(arguments), dict(environment), directory, paths), daemon=True
        )
        process.start()
        process.join(60)
        if process.exitcode is None:
            process.kill()
            raise TimeoutExpired(["nodectl", *arguments], 60)
        return Done(process.exitcode, paths[1].read_text(), paths[2].read_text())


def _become_nodectl(arguments: list[str], environment: dict[str, str], directory: Path, paths: list[Path]) -> None:
    _tie()
    _have_only(*(os.open(path, os.O_RDWR) for path in paths))
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    _settle(environment, directory)
    sys.argv = ["nodectl", *arguments]
    from node.nodectl.app import main

    main()


def _tie() -> None:
    """Begin a session, and end with the interpreter that forked this process."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    tests = parent_process()
    # The interpreter may have ended before the call, but never before the tests.
    if tests is None or not tests.is_alive():
        os._exit(1)


def _settle(environment: Mapping[str, str], directory: Path) -> None:
    os.chdir(directory)
    for name in _INHERITED:
        os.environ.pop(name, None)
    os.environ.update(environment)


def _have_only(*files: int) -> None:
    """Make these files the three standard descriptors, and close all others."""
    for number, source in enumerate(files):
        os.dup2(source, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
