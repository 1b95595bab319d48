"""The scripts from outside: what `scripts/run` prints and cleans up, and what `scripts/test` runs.

`scripts/run` runs in this checkout, with this environment's packages, and with a state and ports of its own.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from drivers.install.releases import SING_BOX, XRAY, InstallError
from node.command_line import SETTINGS
from scripts import demo
from scripts.staging.core import find_xray
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from scripts.staging.sing_box import find_sing_box
from tests.harness.curl import programs_with_curl

_SCRIPTS = Path(__file__).parents[2] / "scripts"
_SIZE = 8 * 1024 * 1024

# Tests that run in the background of a shell ignore SIGINT, their children inherit that, and bash cannot undo it.
_WITH_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Run(Child):
    """`scripts/run` with these arguments, called from a directory that is not the clone."""

    def __init__(self, environment: Mapping[str, str], *arguments: str) -> None:
        command = [sys.executable, "-c", _WITH_CTRL_C, str(_SCRIPTS / "run"), *arguments]
        super().__init__(command, environment, directory=Path(environment["STATE_DIR"]).parent)

    def until_line(self, beginning: str) -> str:
        """Wait for the line that begins with this, and return it."""
        pattern = re.compile(rf"^  {beginning} +(.*)$", re.MULTILINE)
        self.ready(lambda: pattern.search(self.output), 30, f"a line {beginning!r}")
        found = pattern.search(self.output)
        assert found
        return found[1]

    def ends(self, number: signal.Signals, group: bool = False) -> int:
        """Send a signal to the script, or to its group as a terminal does. Returns the status when all have ended."""
        family = psutil.Process(self.pid).children(recursive=True)
        assert family, self.output
        os.killpg(self.pid, number) if group else os.kill(self.pid, number)
        status = self.wait(20)
        _, left = psutil.wait_procs(family, timeout=3)
        assert not left, f"{left}\n{self.output}"
        return status


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """That of CI, with SSL_CERT_FILE in OpenSSL's meaning, and a program on PATH named xray that is not Xray."""
    programs = tmp_path / "bin"
    _program(programs / "xray", "#!/bin/sh\necho something else\n")
    programs_with_curl(programs)
    authorities = tmp_path / "authorities.pem"
    authorities.touch()
    outside = {name: value for name, value in os.environ.items() if name not in {s.name for s in SETTINGS}}
    ours = {
        "CI": "true",
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SSL_CERT_FILE": str(authorities),
        "TXNODE_VENV": sys.prefix,
        "STATE_DIR": str(tmp_path / "var"),
        "REST_PORT": str(free_port()),
        "GRPC_PORT": str(free_port()),
    }
    named = os.environ.keys() & {"TXNODE_TEST_XRAY", "TXNODE_TEST_XRAY_NEW"}
    chosen = {"XRAY_EXECUTABLE_PATH": str(find_xray())} if named else {}
    return outside | ours | chosen


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.core
def test_the_first_call_shows_the_demonstration_and_the_second_only_serves(environment: Mapping[str, str]) -> None:
    """The first changes the configuration during a download and counts 8 MiB from 127.0.0.2; its curl line works.

    Both end whole, by Ctrl-C and by TERM.
    """
    with Run(environment) as run:
        run.until_line("stop")
        assert "all of which arrived" in run.until_line("changed")
        assert _number(run.until_line("counted")) >= _SIZE
        assert "127.0.0.2" in run.until_line("online")
        assert re.search(r"from 127\.0\.0\.2:\d+ accepted .* email: demo", run.output)
        pasted = subprocess.run(
            ["bash", "-c", run.until_line("try")], env=environment, cwd="/", capture_output=True, text=True, check=True
        )
        assert not pasted.stderr
        assert {"xray", "stopped"} <= set(pasted.stdout.splitlines())
        assert run.ends(signal.SIGINT, group=True) == 130
    with Run(environment) as run:
        run.until_line("stop")
        assert "backend" not in run.output
        assert run.ends(signal.SIGTERM) == 143


def _number(text: str) -> int:
    """The first number with thousands separators in the text."""
    return int(re.findall(r"\d[\d,]*", text)[0].replace(",", ""))


@pytest.mark.slow
@pytest.mark.core
def test_ctrl_c_inside_the_demonstration_leaves_nothing(environment: Mapping[str, str]) -> None:
    """While two cores run, the node's and the client's, Ctrl-C ends both, and the backend is stopped first."""
    with Run(environment) as run:
        run.until_line("backend")
        assert run.ends(signal.SIGINT, group=True) == 130
    assert "a controller asked for it" in (Path(environment["STATE_DIR"]) / "node.log").read_text()


@pytest.mark.core
def test_a_used_port_ends_the_script_with_the_nodes_error(environment: Mapping[str, str]) -> None:
    """Another process on the port is not mistaken for the node."""
    with socket.create_server(("", int(environment["REST_PORT"]))), Run(environment) as run:
        assert run.wait(30) == 1
    assert re.search(rf"^txnode cannot start: .*{environment['REST_PORT']}", run.output, re.MULTILINE)


def test_the_demonstration_has_the_cores_of_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client runs the executable in the node's settings, also if they are in `.env`."""
    (tmp_path / ".env").write_text(
        "API_KEY=a key of some length\nXRAY_EXECUTABLE_PATH=/opt/xray\nSING_BOX_EXECUTABLE_PATH=/opt/box\n"
    )
    (tmp_path / "var").mkdir()
    for name in ("certificate.pem", "key.pem"):
        (tmp_path / "var" / name).touch()
    monkeypatch.chdir(tmp_path)
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    drivers = demo.settings_here().cores
    assert [drivers.get(core.variable("EXECUTABLE_PATH")) for core in (XRAY, SING_BOX)] == ["/opt/xray", "/opt/box"]


def _tested(directory: Path, *arguments: str, **more: str) -> list[str]:
    """The commands that `scripts/test` runs with a fake Python, and the other Xray of each.

    Without the one that compiles the tests, which runs beside the linters.
    """
    record = directory / "record"
    named = "${TXNODE_TEST_XRAY_NEW:+ on $TXNODE_TEST_XRAY_NEW}"
    _program(directory / "bin" / "python", f'#!/bin/sh\necho "$*{named}" >>{record}\n')
    environment = {"PATH": os.environ["PATH"], "TXNODE_VENV": str(directory), **more}
    subprocess.run([_SCRIPTS / "test", *arguments], env=environment, check=True, capture_output=True)
    lines = [line.removeprefix("-m ") for line in record.read_text().splitlines() if "--collect-only" not in line]
    assert lines.pop(0) == "scripts.packaging.version"
    return lines


_CHECKS = ["ruff", "ruff", "codespell_lib", "mypy"]
_CORES = ["scripts.cores"] * 3
_PROCESSORS = len(os.sched_getaffinity(0))


def _begins(commands: list[str]) -> list[str]:
    return [command.split()[0] for command in commands]


def test_the_fast_run(tmp_path: Path) -> None:
    """`--fast` neither looks for nor installs cores, and skips marked tests; it runs the linters."""
    *checks, tests = _tested(tmp_path, "--fast", "-x")
    assert _begins(checks) == _CHECKS
    assert tests.startswith(f"pytest -n {_PROCESSORS + 1} ")
    assert tests.endswith(" -m not core and not slow and not machine and not nightly -x")


def test_the_default_run(tmp_path: Path) -> None:
    """It finds the cores, then runs each test on one of them, but those that need the machine's tools, or a night."""
    *checks, tests = _tested(tmp_path, "-x")
    assert _begins(checks) == [*_CORES, *_CHECKS]
    assert tests.startswith(f"pytest -n {min(3 * _PROCESSORS, 12)} ") and " --in-turn " in tests
    assert tests.partition(" -m ")[2] == "not machine and not nightly -x"


def test_a_run_of_some_files(tmp_path: Path) -> None:
    """With a path it runs those tests on every core, in one process, without the linters."""
    *checks, tests = _tested(tmp_path, "tests/node", "-x")
    assert _begins(checks) == _CORES
    assert tests == "pytest -n 0 -m not machine and not nightly tests/node -x"
    (tmp_path / "fast").mkdir()
    [tests] = _tested(tmp_path / "fast", "--fast", "tests/node/keys/test_keys.py::test_nothing")
    assert tests.startswith("pytest -n 0 --ignore tests/live")


def test_the_nightly_run(tmp_path: Path) -> None:
    """`--nightly` runs every test on each core, then lists packages that the tests of the machine need."""
    path = _debian(tmp_path, "not-installed")
    *checks, tests = _tested(tmp_path, "--nightly", "-x", PATH=path)
    assert _begins(checks) == [*_CORES, *_CHECKS]
    assert tests.endswith(" --hypothesis-profile nightly --timeout 1800 -m not machine -x")
    assert " --each-once " in tests and "--in-turn" not in tests
    (tmp_path / "again").mkdir()
    *_, again = _tested(tmp_path / "again", "--nightly", PATH=path, TXNODE_TEST_XRAY_NEW="/opt/xray")
    assert " -m core and not machine --ignore" in again


def test_the_tests_of_xray_on_another_one(tmp_path: Path) -> None:
    """All tests run as usual, then those that use Xray run on the given one."""
    *_, tests, again = _tested(tmp_path, "tests/live", TXNODE_TEST_XRAY_NEW="/opt/xray")
    assert tests.partition(" -m ")[2] == "not machine and not nightly tests/live"
    assert again.startswith("pytest ")
    left_out = "--ignore tests/drivers -k not sing_box and not sing-box"
    assert f" -m core and not machine and not nightly {left_out} tests/live" in again
    assert again.endswith(" on /opt/xray")
    assert not tests.endswith(" on /opt/xray")


def test_continuous_integration() -> None:
    """`.ci/run` is `scripts/test` for every user; what it makes for root is gone at the end."""
    ours, done = (
        subprocess.run([script, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        for script in (_SCRIPTS / "test", _SCRIPTS.with_name(".ci") / "run")
    )
    before, usage, after = done.stdout.partition(ours.stdout)
    assert usage and not after
    homes = re.findall(r"^As the user \w+, in (/\S+)/clone$", before, re.MULTILINE)
    assert len(homes) == (os.geteuid() == 0)
    assert not any(Path(home).exists() for home in homes)


def _debian(directory: Path, status: str) -> str:
    """A PATH with a dpkg-query that reports this state for each package."""
    _program(directory / "debian" / "dpkg-query", f"#!/bin/sh\necho -n {status}\n")
    return f"{directory / 'debian'}:{os.environ['PATH']}"


def test_what_the_tests_of_the_machine_are(tmp_path: Path) -> None:
    """`--machine` finds both cores first, then runs the marked tests one after another."""
    *cores, tests = _tested(tmp_path, "--machine", PATH=_debian(tmp_path, "installed"))
    assert [core.split()[0] for core in cores] == ["scripts.cores"] * 3
    assert tests == "pytest --timeout 600 -m machine -o testpaths=tests/machine"


def test_packages_that_the_tests_of_the_machine_lack(tmp_path: Path) -> None:
    """All missing packages are named before anything runs; without `--install` apt-get is not called."""
    with pytest.raises(subprocess.CalledProcessError) as failed:
        _tested(tmp_path, "--machine", PATH=_debian(tmp_path, "not-installed"))
    named = [
        line
        for line in _SCRIPTS.with_name("tests").joinpath("machine", "packages").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert f"missing: {' '.join(named)}." in failed.value.stderr.decode()
    assert not (tmp_path / "record").exists()


@pytest.mark.core
def test_an_xray_that_is_named_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the pinned Xray nor another one is used instead."""
    monkeypatch.setenv("TXNODE_TEST_XRAY_NEW", "/nowhere/xray")
    with pytest.raises(InstallError, match="there is no file /nowhere/xray"):
        find_xray.__wrapped__()


@pytest.mark.parametrize("find", [find_xray, find_sing_box])
def test_no_core_without_the_mark(find: Callable[[], Path]) -> None:
    """A test that uses a core without the mark that `--fast` skips fails; it is not skipped."""
    with pytest.raises(InstallError, match="/this/test/lacks/the/mark/core"):
        find()


@pytest.mark.core
@pytest.mark.parametrize("find", [find_xray, find_sing_box])
def test_a_core_with_the_mark(find: Callable[[], Path]) -> None:
    """With the mark there is one, whichever test ran before."""
    assert find().is_file()
