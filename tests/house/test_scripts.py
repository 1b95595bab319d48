"""The scripts from outside: what `scripts/run` shows and says, that nothing of it is left, what `scripts/test` runs.

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
from node.tap import SETTINGS
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
        """The line that begins so, when it is there."""
        pattern = re.compile(rf"^  {beginning} +(.*)$", re.MULTILINE)
        self.ready(lambda: pattern.search(self.output), 30, f"a line {beginning!r}")
        found = pattern.search(self.output)
        assert found
        return found[1]

    def ends(self, number: signal.Signals, group: bool = False) -> int:
        """Send the signal to the script alone, or to its group as a terminal does. The status, when all is gone."""
        family = psutil.Process(self.pid).children(recursive=True)
        assert family, self.output
        os.killpg(self.pid, number) if group else os.kill(self.pid, number)
        status = self.wait(20)
        _, left = psutil.wait_procs(family, timeout=3)
        assert not left, f"{left}\n{self.output}"
        return status


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """CI's, with OpenSSL's own meaning of SSL_CERT_FILE, and with a program on PATH that is called xray and is none."""
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


@pytest.mark.core
def test_first_call_shows_the_main_job_and_the_second_only_serves(environment: Mapping[str, str]) -> None:
    """The first changes the configuration under a download and counts 8 MiB from 127.0.0.2; its curl line works.

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


@pytest.mark.core
def test_ctrl_c_inside_the_demonstration_leaves_nothing(environment: Mapping[str, str]) -> None:
    """While two cores run, the node's and the client's, Ctrl-C ends both, and the backend is stopped in good order."""
    with Run(environment) as run:
        run.until_line("backend")
        assert run.ends(signal.SIGINT, group=True) == 130
    assert "a controller asked for it" in (Path(environment["STATE_DIR"]) / "node.log").read_text()


@pytest.mark.core
def test_a_taken_port_ends_the_script_with_the_nodes_words(environment: Mapping[str, str]) -> None:
    """Whoever has the port is not taken for the node."""
    with socket.create_server(("", int(environment["REST_PORT"]))), Run(environment) as run:
        assert run.wait(30) == 1
    assert re.search(rf"^txnode cannot start: .*{environment['REST_PORT']}", run.output, re.MULTILINE)


def test_the_demonstration_has_the_cores_of_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is run with the executable that the node's settings name, wherever they stand: in `.env`, too."""
    (tmp_path / ".env").write_text(
        "API_KEY=a key of some length\nXRAY_EXECUTABLE_PATH=/opt/xray\nSING_BOX_EXECUTABLE_PATH=/opt/box\n"
    )
    (tmp_path / "var").mkdir()
    for name in ("certificate.pem", "key.pem"):
        (tmp_path / "var" / name).touch()
    monkeypatch.chdir(tmp_path)
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    drivers = demo.settings_here().drivers
    assert [drivers.get(core.variable("EXECUTABLE_PATH")) for core in (XRAY, SING_BOX)] == ["/opt/xray", "/opt/box"]


def _tested(directory: Path, *arguments: str, **more: str) -> list[str]:
    """What `scripts/test` has a Python do that does nothing, command by command, and on which other Xray."""
    record = directory / "record"
    named = "${TXNODE_TEST_XRAY_NEW:+ on $TXNODE_TEST_XRAY_NEW}"
    _program(directory / "bin" / "python", f'#!/bin/sh\necho "$*{named}" >>{record}\n')
    environment = {"PATH": os.environ["PATH"], "TXNODE_VENV": str(directory), **more}
    subprocess.run([_SCRIPTS / "test", *arguments], env=environment, check=True, capture_output=True)
    return [line.removeprefix("-m ") for line in record.read_text().splitlines()]


def test_what_the_fast_tests_are(tmp_path: Path) -> None:
    """With `--fast` no core is looked for or installed, and what has a mark is left out; linters and types are not."""
    *checks, tests = _tested(tmp_path, "--fast", "tests/node", "-x")
    assert [check.split()[0] for check in checks] == ["ruff", "ruff", "mypy"]
    assert tests.startswith("pytest ")
    assert "-m not core and not slow and not machine" in tests
    assert tests.endswith(" tests/node -x")


def test_what_all_tests_are(tmp_path: Path) -> None:
    """Without it there are both cores first, and nothing is left out but what the machine must have tools for."""
    *checks, tests = _tested(tmp_path, "tests/node", "-x")
    assert [check.split()[0] for check in checks] == [*["drivers.install"] * 3, "ruff", "ruff", "mypy"]
    assert tests.startswith("pytest ")
    assert tests.partition(" -m ")[2] == "not machine tests/node -x"


def test_the_tests_of_xray_on_another_one(tmp_path: Path) -> None:
    """All tests are run as ever, then those that run an Xray, on the one that is named."""
    *_, tests, again = _tested(tmp_path, "tests/live", TXNODE_TEST_XRAY_NEW="/opt/xray")
    assert tests.partition(" -m ")[2] == "not machine tests/live"
    assert again.startswith("pytest ")
    left_out = "--ignore tests/drivers -k not sing_box and not sing-box"
    assert f" -m core and not machine {left_out} tests/live" in again
    assert again.endswith(" on /opt/xray")
    assert not tests.endswith(" on /opt/xray")


def _debian(directory: Path, status: str) -> str:
    """A PATH on which dpkg-query says this of each package."""
    _program(directory / "debian" / "dpkg-query", f"#!/bin/sh\necho -n {status}\n")
    return f"{directory / 'debian'}:{os.environ['PATH']}"


def test_what_the_tests_of_the_machine_are(tmp_path: Path) -> None:
    """With `--machine` there are both cores first, then the tests with the mark, one after another."""
    *cores, tests = _tested(tmp_path, "--machine", PATH=_debian(tmp_path, "installed"))
    assert [core.split()[0] for core in cores] == ["drivers.install"] * 3
    assert tests == "pytest --timeout 600 -m machine -o testpaths=tests/machine"


def test_packages_that_the_tests_of_the_machine_lack(tmp_path: Path) -> None:
    """All that are missing are named before anything runs; without `--install` apt-get is not called."""
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
    """Neither the pinned one nor another one takes its place."""
    monkeypatch.setenv("TXNODE_TEST_XRAY_NEW", "/nowhere/xray")
    with pytest.raises(InstallError, match="there is no file /nowhere/xray"):
        find_xray.__wrapped__()


@pytest.mark.parametrize("find", [find_xray, find_sing_box])
def test_no_core_without_the_mark(find: Callable[[], Path]) -> None:
    """A test that asks for a core fails unless it says so, by what `--fast` leaves out: it is not skipped."""
    with pytest.raises(InstallError, match="/this/test/lacks/the/mark/core"):
        find()


@pytest.mark.core
@pytest.mark.parametrize("find", [find_xray, find_sing_box])
def test_a_core_with_the_mark(find: Callable[[], Path]) -> None:
    """With it there is one, whatever ran before."""
    assert find().is_file()
