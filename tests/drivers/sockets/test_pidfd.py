"""The reason why the kernel refuses access to a process's sockets, and what an operator has to allow."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from drivers.sockets import connections, pidfd
from drivers.sockets.listeners import survey
from drivers.sockets.pidfd import Unreachable
from tests.harness import confined
from tests.harness.steered import Greeter

ROOT = Path(__file__).parents[3]
EVERYWHERE = [range(65536)]
# The result of `survey` for this process, in another one.
ASK = "import os, sys; from drivers.sockets.listeners import survey; {}print(*survey(int(sys.argv[1]), []).obstacles)"


def obstacles_of(pid: int, through: Sequence[str] = (), first: str = "") -> str:
    argv = [*through, sys.executable, "-c", ASK.format(first), str(pid)]
    return subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.fixture
def greeter() -> Iterator[Greeter]:
    """A process without capabilities: one with fewer than it has may not trace it."""
    with Greeter("a", [("127.0.0.1", 0)], through=confined.argv()) as one:
        yield one


@pytest.mark.parametrize("call", ["pidfd_open", "pidfd_getfd"])
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_filter_of_system_calls(greeter: Greeter, call: str, error: int) -> None:
    """With seccomp, as in a container or under systemd: the error names both calls and where to allow them."""
    text = obstacles_of(greeter.pid, confined.argv([call], error))
    assert "may not call pidfd_open and pidfd_getfd" in text
    assert "SYS_PTRACE" in text and "seccomp" in text and "SystemCallFilter" in text
    assert os.strerror(error) in text


def test_no_capability(greeter: Greeter) -> None:
    """Access needs no capability."""
    assert obstacles_of(greeter.pid, confined.argv()) == "\n"


def test_a_process_that_may_not_be_traced() -> None:
    """The calls are allowed, but not tracing, as with another user: the error names what else to allow."""
    text = obstacles_of(1, first="os.setuid(65534); " if os.getuid() == 0 else "")
    assert "may not trace the core" in text
    assert "mode 0755" in text and "kernel.yama.ptrace_scope" in text


def test_another_error() -> None:
    """Without free descriptors, for example, there is nothing to allow."""
    assert str(Unreachable(OSError(errno.EMFILE, "Too many open files"))).startswith("the node cannot reach")


def test_a_process_that_is_hidden(greeter: Greeter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process hidden in /proc does not count as exited, although it seems to listen on nothing."""
    monkeypatch.setattr(pidfd, "_FILES", str(tmp_path / "{}"))
    [reason] = survey(greeter.pid, EVERYWHERE).obstacles
    assert "may not trace the core" in reason
    with pytest.raises(Unreachable):
        connections.alive(greeter.pid, EVERYWHERE)
    greeter.kill()
    assert survey(greeter.pid, EVERYWHERE).obstacles == ()
