"""The documents: the README's examples run as they are, tables match the code, and named files exist."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from node import NUMBER, __version__
from node.api.methods import METHODS
from node.base.errors import KINDS
from node.certificate import ensure, ensure_api_key
from node.command_line import SETTINGS
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from tests.harness.curl import programs_with_curl

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}


def text(page: str) -> str:
    return (ROOT / page).read_text()


def example(language: str, word: str) -> str:
    """The only block of the README in this language with this word."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", text("README.md"), re.DOTALL | re.MULTILINE)
    [block] = [block for block in blocks if word in block]
    return str(block)


def run(command: Sequence[str], directory: Path, programs: Path | None = None) -> str:
    """Run a command and return its output. Raises `AssertionError` with the output if it fails."""
    done = subprocess.run(
        command,
        cwd=directory,
        env={**ENVIRONMENT, "PATH": f"{programs}:{os.environ['PATH']}" if programs else os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


class RealNode(NodeProcess):
    """Not a copy of an interpreter: nodectl reads the environment that the process was started with."""

    child = Child


class Clone:
    """A clone as after `scripts/run`: `.venv`, `protos`, `var`, and a node on ports of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / ".venv").symlink_to(sys.prefix)
        (directory / "protos").symlink_to(ROOT / "protos")
        ensure(directory / "var")
        self.key = ensure_api_key(directory / "var" / "api_key")
        # Without these four the node uses the files in var, as with `scripts/run`.
        self.node = RealNode(directory, STATE_DIR="", API_KEY="", SSL_CERT_FILE="", SSL_KEY_FILE="")
        self._ports = {"62050": self.node.grpc_port, "62051": self.node.rest_port, "21443": free_port()}

    def here(self, block: str) -> str:
        """The example with this clone's ports, and for a machine that may know no name."""
        block = block.replace("localhost", "127.0.0.1")
        for documented, port in self._ports.items():
            block = block.replace(documented, str(port))
        return block


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Clone]:
    place = Clone(tmp_path)
    with place.node:
        yield place


@pytest.mark.core
def test_the_curl_example_prints_the_nodes_state(clone: Clone) -> None:
    """The block with curl runs as it is, and prints the state and the node's version."""
    programs = programs_with_curl(clone.directory / "bin")
    printed = run(["bash", "-euo", "pipefail", "-c", clone.here(example("sh", "curl"))], clone.directory, programs)
    assert 'state: "stopped"' in printed
    assert f'version: "{__version__}"' in printed


@pytest.mark.slow
@pytest.mark.core
def test_the_nodectl_example_runs_a_core(clone: Clone) -> None:
    """The block with nodectl runs as it is: the core starts, confirms the user, and stops."""
    # With the default ports these settings are not needed.
    ports = f"export REST_PORT={clone.node.rest_port} GRPC_PORT={clone.node.grpc_port}\n"
    block = ports + clone.here(example("sh", "nodectl start"))
    printed = run(["bash", "-euo", "pipefail", "-c", block], clone.directory)
    rows = [line.split() for line in printed.splitlines()]
    assert [row[:2] for row in rows if row[0] in ("running", "stopped")] == [["running", "xray"], ["stopped", "xray"]]
    assert ["alice", "in", "confirmed"] in rows
    assert ["in", "0", "0"] in rows
    assert not clone.node.core_pids()


@pytest.mark.core
def test_the_python_example_runs_a_core(clone: Clone) -> None:
    """The block in Python runs as it is: the core starts, the user has two rows of zeros, the core stops."""
    (clone.directory / "example.py").write_text(clone.here(example("python", "import grpc")))
    printed = run([".venv/bin/python", "example.py"], clone.directory).splitlines()
    assert re.fullmatch(r"xray [\d.]+ running", printed[0])
    assert sorted(printed[1:3]) == ["alice downlink 0 bytes", "alice uplink 0 bytes"]
    assert printed[3:] == ["stopped"]
    assert not clone.node.core_pids()


@pytest.mark.core
@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_the_controller_in_python_runs_a_core(clone: Clone, transport: str) -> None:
    """The program of docs/controllers.md prints what happened; those in other languages are machine tests."""
    program = clone.directory / "controller.py"
    program.write_text(clone.here(text("docs/examples/python/controller.py")))
    port = clone.node.rest_port if transport == "rest" else clone.node.grpc_port
    where = ["127.0.0.1", str(port), "var/api_key", "var/certificate.pem", transport]
    *told, log, last = run([".venv/bin/python", program.name, *where], clone.directory).splitlines()
    assert told == ["started xray running", "refused users_refused", "user alice", "event backend.running"]
    assert (log.split()[0], last) == ("log", "stopped stopped")


def test_controllers_know_what_to_do_on_each_error() -> None:
    """docs/controllers.md has every code, with its statuses, below its heading of errors."""
    rows = [line.split(" | ") for line in text("docs/controllers.md").partition("## Errors")[2].splitlines()]
    told = {(code, http, rpc) for codes, *row in rows if len(row) == 3 for code, http, rpc in _rows(codes, *row[:2])}
    assert told >= {(kind.code, str(kind.http), kind.grpc) for kind in KINDS}


def _rows(codes: str, http: str, rpc: str) -> Iterator[tuple[str, str, str]]:
    """Each code of a row, with its statuses: one for all, or one each."""
    names, numbers, words = (re.findall(r"\w+", cell.replace("|", "")) for cell in (codes, http, rpc))
    for place, name in enumerate(names):
        yield name, numbers[min(place, len(numbers) - 1)], words[min(place, len(words) - 1)]


@pytest.mark.core
def test_the_client_example_calls_the_node(clone: Clone) -> None:
    """The block with the client prints the state, an error with its code, and a line of the log."""
    (clone.directory / "client.py").write_text(clone.here(example("python", "node.client")))
    printed = run([".venv/bin/python", "client.py"], clone.directory).splitlines()
    assert re.fullmatch(r"xray [\d.]+ stopped", printed[0])
    assert printed[1:] == ["backend_not_initialized: backend not initialized", f"[node] txnode {__version__} is ready"]


def test_the_two_commands_are_there() -> None:
    """The commands of the quick start exist and are executable."""
    for command in shlex.split(example("sh", "scripts/run"), comments=True):
        assert os.access(ROOT / command, os.X_OK), f"{command} is not there, or not executable"


def test_the_tables_match_the_code() -> None:
    """`scripts/docs` would change nothing."""
    run([sys.executable, "scripts/docs", "--check"], ROOT)


def test_every_operation_error_and_setting_is_in_its_page() -> None:
    """No row of METHODS, KINDS or SETTINGS is missing, independently of scripts/docs."""
    interface, settings = text("docs/interface.md"), text("docs/settings.md")
    for method in METHODS:
        assert f"`{method.name}` | `{' or '.join(method.verbs)} {method.path}`" in interface
    for kind in KINDS:
        assert f"`{kind.code}` | {kind.http} | `{kind.grpc}`" in interface
    for setting in SETTINGS:
        assert f"| `{setting.name}` |" in settings


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link into the repository names an existing file, and every anchor an existing heading."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    """Named files of the repository and modules to run exist."""
    words = page.read_text()
    for file in re.findall(r"`((?:node|drivers|protos|docs|deploy|scripts|tests)/[\w./-]+)`", words):
        assert (ROOT / file).exists(), f"{page.name} names {file}"
    for module in re.findall(r"python -m ([a-z_]+\.[a-z_]+)", words):
        assert importlib.util.find_spec(module), f"{page.name} runs {module}"


def test_every_room_is_in_the_table() -> None:
    """CONTRIBUTING.md names every room, and every module of the hall."""
    contributing = text("CONTRIBUTING.md")
    rooms = {module.parent.relative_to(ROOT) for top in ("node", "drivers") for module in (ROOT / top).rglob("*.py")}
    for room in rooms:
        assert f"`{room}/`" in contributing, f"CONTRIBUTING.md does not know {room}"
    for module in (ROOT / "node").glob("[a-z]*.py"):
        assert re.search(rf"\b{module.stem}\b", contributing), f"CONTRIBUTING.md does not know {module.name}"


def test_the_install_page_fits_the_unit() -> None:
    """docs/install.md uses the paths in deploy/node.service."""
    install, unit = text("docs/install.md"), text("deploy/node.service")
    for place in ("/opt/txnode/.venv", "TXNODE_CORES=/opt/txnode/cores", "/etc/txnode/node.env"):
        assert place in install
        assert place in unit
    assert "STATE_DIR=%S/txnode" in unit
    assert "node.certificate /var/lib/txnode" in install


def test_the_changelog_has_this_version() -> None:
    """The newest release has a section."""
    assert re.search(rf"^## \[{re.escape(NUMBER)}\] - ", text("CHANGELOG.md"), re.MULTILINE)


def test_fragments_have_a_known_type() -> None:
    """Each file in changes/ has a name that towncrier knows, and changes/README.md has every type."""
    configured = tomllib.loads(text("pyproject.toml"))["tool"]["towncrier"]["type"]
    types = [each["directory"] for each in configured]
    assert re.findall(r"^\| `(\w+)` \|", text("changes/README.md"), re.MULTILINE) == types
    for fragment in (ROOT / "changes").iterdir():
        known = re.fullmatch(rf"(\d+|\+[\w-]+)\.({'|'.join(types)})\.md", fragment.name)
        assert known or fragment.name == "README.md", f"{fragment.name}: the type is not one of {', '.join(types)}"
