"""A leashed core: it is the command itself, and ends with the node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from drivers.install.leash import leashed
from scripts.staging.wait import until
from tests.drivers.process.test_child import python

ROOT = Path(__file__).parents[3]


def ends(pid: int) -> None:
    """Wait until the process has ended, if only as a zombie that its new parent has not reaped."""

    def gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(gone, 5, f"process {pid} ends")


PARENT = """
import os, sys
from drivers.install.leash import leashed
command = [sys.executable, "-I", "-S", "-c", "import time; print('running', flush=True); time.sleep(60)"]
command = leashed(command)
print(os.posix_spawn(command[0], command, {}), flush=True)
sys.stdin.read()
"""


def test_a_killed_node_ends_its_core() -> None:
    """After kill -9 of the parent the leashed child ends, too."""
    argv = [sys.executable, "-c", PARENT]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        said = sorted([parent.stdout.readline().strip(), parent.stdout.readline().strip()])
        assert said[1] == "running"
        parent.kill()
        parent.wait()
        ends(int(said[0]))


def test_a_leashed_core_is_the_command_itself() -> None:
    """It has the command's arguments, the PID of the spawned process, and its own exit code."""
    code = "import os, sys; print(os.getpid(), sys.argv[1:]); sys.exit(7)"
    child = subprocess.Popen(leashed([*python(code), "a b", "--c"]), stdout=subprocess.PIPE, text=True)
    said, _ = child.communicate()
    assert said == f"{child.pid} ['a b', '--c']\n"
    assert child.returncode == 7


def test_a_leash_without_a_node() -> None:
    """A core whose node has ended before its start does not start."""
    command = leashed(python("print('began')"))
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 1)
    assert "gone" in done.stderr


@pytest.mark.parametrize("path", ["/nowhere/core", os.devnull])
def test_a_core_that_cannot_be_run(path: str) -> None:
    """One line names an executable that is missing or not executable, with the reason."""
    done = subprocess.run(leashed([path]), capture_output=True, text=True, check=False)
    assert done.returncode in (126, 127)
    assert done.stderr.startswith(f"cannot run {path}: ")
    assert done.stderr.count("\n") == 1
