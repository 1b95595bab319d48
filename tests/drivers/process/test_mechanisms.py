"""Each mechanism of the kernel, refused as in a container: it is named with what is lost, and no other one is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from drivers.process import mechanisms
from drivers.process.mechanisms import MECHANISMS, Mechanism, refused
from drivers.sockets import pidfd
from drivers.sockets.pidfd import Unreachable
from tests.harness import confined
from tests.harness.open_files import open_files

ROOT = Path(__file__).parents[3]
ASK = "from drivers.process.mechanisms import refused; print(*refused(), sep='\\n')"
# By what is refused: the words, in a mechanism's name, of those that are lost.
LOST = {
    "pidfd_getfd": ["pidfd_getfd"],
    "pidfd_open": ["pidfd_open"],
    "landlock_create_ruleset": ["Landlock"],
    "sock_diag": ["sock_diag"],
    "F_SETPIPE_SZ": ["F_SETPIPE_SZ"],
    "SO_MAX_PACING_RATE": ["SO_MAX_PACING_RATE"],
    "SO_ATTACH_REUSEPORT_CBPF": ["SO_ATTACH_REUSEPORT_CBPF", "SO_BINDTOIFINDEX"],
    "SO_BINDTOIFINDEX": ["SO_BINDTOIFINDEX"],
    "IP_MINTTL": ["IP_MINTTL"],
}


def refused_through(through: Sequence[str]) -> list[str]:
    argv = [*through, sys.executable, "-c", ASK]
    return subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split("\n")[:-1]


@pytest.mark.parametrize("call", confined.CALLS)
def test_each_refusal(call: str) -> None:
    """It is one line: the name, what follows for users, and why."""
    lines = refused_through(confined.argv([call]))
    lost = [one for word in LOST[call] for one in MECHANISMS if word in one.name]
    assert len(lines) == len(lost) == len(LOST[call])
    for line, one in zip(lines, lost, strict=True):
        assert line.startswith(f"{one.name}, so {one.lost}: ")
        assert len(line) > len(f"{one.name}, so {one.lost}: ")


def test_no_capability_is_needed() -> None:
    """What the recommended unit has is enough, and less."""
    assert refused_through(confined.argv()) == [""]


def test_every_mechanism_can_be_refused() -> None:
    """The tests above have each of them."""
    assert {
        one for one in MECHANISMS if not any(word in one.name for words in LOST.values() for word in words)
    } == set()


def test_nothing_is_left_open() -> None:
    """What earlier tests have left may close meanwhile."""
    before = open_files()
    refused()
    assert open_files().items() <= before.items()


def test_an_unexpected_error_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised, for the log."""

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(mechanisms, "MECHANISMS", [Mechanism("a", "1", "", "all is lost", fail)])
    with pytest.raises(ZeroDivisionError):
        refused()


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of Yama."""
    monkeypatch.setattr(pidfd, "_SCOPE", tmp_path / "ptrace_scope")
    monkeypatch.setattr(pidfd, "_STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("CapPrm:\t0000000000080000\nCapEff:\t0000000000000400\nCapBnd:\t0\n")
    yield tmp_path / "ptrace_scope"


@pytest.mark.parametrize("allowed", ["0\n", "1\n", None])
def test_yama_allows_it(scope: Path, allowed: str | None) -> None:
    """Also by a rule that asks for descent, and where there is no Yama."""
    if allowed is not None:
        scope.write_text(allowed)
    pidfd.check()


@pytest.mark.parametrize("number", [2, 3])
def test_yama_forbids_it(scope: Path, number: int) -> None:
    """The reason has the value to set."""
    scope.write_text(f"{number}\n")
    with pytest.raises(Unreachable, match=rf"must be 0 or 1 .*ptrace_scope is {number}"):
        pidfd.check()


def test_yama_allows_it_with_a_capability(scope: Path) -> None:
    """CAP_SYS_PTRACE, but not where no process may trace."""
    (scope.parent / "status").write_text(f"CapEff:\t{1 << 19:016x}\nCapBnd:\t0\n")
    scope.write_text("2\n")
    pidfd.check()
    scope.write_text("3\n")
    with pytest.raises(Unreachable):
        pidfd.check()


def test_a_process_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The numbers of descriptors come from there."""
    monkeypatch.setattr(pidfd, "_FILES", str(tmp_path / "{}"))
    with pytest.raises(Unreachable, match=os.strerror(2)):
        pidfd.check()
