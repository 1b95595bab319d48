"""A child process of a test: its output is kept, and it is always stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from scripts.staging.wait import until

# The kernel sends the parent-death signal (prctl(2)) when the thread that forked has ended: this one stays.
_forking = ThreadPoolExecutor(1, "forking")
# Start the thread now: if Ctrl-C comes while the executor starts it, the end of Python waits for that thread forever.
_forking.submit(int).result()
_TIED = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "--")


def tied(argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process like `subprocess.Popen`; the kernel kills it when this process ends, also by a kill."""
    return _forking.submit(lambda: subprocess.Popen([*_TIED, *argv], **options)).result()


def freeze(pid: int) -> None:
    """Suspend a process. Returns when all its threads have stopped: on a busy machine they run on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()), what=f"{pid} has stopped")


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


class Running(Protocol):
    """The part of `subprocess.Popen` that `Child` uses."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Child:
    """Runs `argv` in its own session with exactly this environment, `tied`. `lines` are its stdout and stderr.

    `stop` sends TERM, then KILL after a timeout; leaving the `with` block stops it.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], stdin: bytes = b"", directory: Path | None = None
    ) -> None:
        self.lines: list[str] = []
        self._process = self._run(argv, environment, directory)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._feed(stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """Its lines as one text, for error messages."""
        return "\n".join(self.lines)

    def ready(self, condition: Callable[[], object], timeout: float, what: str) -> None:
        """Wait for the condition. Raises `AssertionError` with the output at the timeout, or if the child ends."""
        try:
            until(lambda: not self.running or condition(), timeout, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; its output:\n{self.output}")
        assert self.running, f"{what}: it ended with {self.wait()}; its output:\n{self.output}"

    def wait(self, timeout: float = 10.0) -> int:
        """Wait for its exit status, negative for a signal. Raises `subprocess.TimeoutExpired` if it still runs."""
        status = self._process.wait(timeout)
        self._reader.join(timeout=1)
        return status

    def stop(self, timeout: float = 10.0) -> int:
        """Send TERM and return the exit status. After `timeout` seconds, kill it and raise `AssertionError`."""
        self._process.terminate()
        try:
            return self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it does not end within {timeout:g} s of TERM; its output:\n{self.output}")

    def kill(self) -> int:
        """Send KILL and return the exit status."""
        self._process.kill()
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, argv: Sequence[str], environment: Mapping[str, str], directory: Path | None) -> Running:
        return tied(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=directory,
            start_new_session=True,
        )

    def _feed(self, stdin: bytes) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(stdin)
            self._process.stdin.close()
        except BrokenPipeError:
            self.lines.append("(it did not read its standard input)")

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as stream:
            for line in stream:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))
