"""The architecture, held over the syntax trees: imports point one way, and each dangerous thing has its one place."""

from __future__ import annotations

import ast
import configparser
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node import deployed

ROOT = Path(__file__).parents[2]

# What the modules of each room may import of ours, beside their own room and `protos`: rooms, or single modules.
ROOMS: dict[str, set[str]] = {
    "node": {
        *("node.contract.settings", "node.updates.policy"),
        *("node.limits.defaults", "node.limits.wording", "node.limits.words"),
    },
    "node.contract": {"node.aio", "node.errors", "node.logs", "node.reactor"},
    "node.machine": {"node.logs", "node.periodic", "node.reactor"},
    "node.state": {"node.contract", "node.logs", "node.reactor", "node.waiting"},
    "node.traffic": {"node.contract", "node.state", "node.errors", "node.logs", "node.periodic", "node.waiting"},
    "node.backend": {
        *("node.contract", "node.events", "node.machine", "node.state"),
        *("node.errors", "node.logs", "node.periodic", "node.reactor", "node.waiting"),
    },
    "node.api": {
        *("node.backend", "node.contract", "node.events", "node.limits", "node.machine", "node.state", "node.traffic"),
        *("node", "node.errors", "node.logs", "node.periodic", "node.reactor", "node.waiting"),
        *("node.keyfile", "node.secret_file", "node.settings", "node.watching"),
    },
    "node.limits": {
        *("node.backend", "node.contract", "node.events", "node.machine", "node.state", "node.traffic"),
        *("node.errors", "node.logs", "node.periodic", "node.reactor", "node.waiting"),
    },
    "node.doctor": {"node.certificate", "node.secret_file", "node.settings", "node.state"},
    "node.events": {"node.logs", "node.state", "node.waiting"},
    "node.metrics": {
        *("node.backend", "node.contract", "node.machine", "node.state", "node.traffic"),
        *("node", "node.api.pages", "node.errors", "node.logs", "node.periodic", "node.reactor"),
    },
    "node.door": {"node.http2", "node.logs", "node.repeated", "node.sockets", "node.waiting", "node.watching"},
    "node.transport": {"node.api", "node.door", "node.aio", "node.errors", "node.keyfile", "node.logs", "node.waiting"},
    "node.upgrade": {"node", "node.contract", "node.errors", "node.events", "node.logs", "node.reactor"},
    "node.updates": {
        *("node", "node.contract", "node.events", "node.errors", "node.logs", "node.periodic", "node.reactor"),
        "node.secret_file",
    },
    "node.client": {"node.api", "node.aio", "node.errors", "node.logs"},
    "node.nodectl": {"node", "node.aio", "node.client", "node.env_file", "node.errors", "node.logs", "node.reactor"}
    | {"node.settings", "node.nodectl.users", "node.secret_file", "node.keys", "node.keyfile", "node.certificate"}
    | {"drivers.install", "node.doctor"},
    "node.nodectl.users": {"node.contract"},
    "node.nodectl.commands": {
        "node.doctor",
        "node.limits.wording",
        "node.nodectl",
        "node.nodectl.users",
        "node.client",
        "node.errors",
        "node.logs",
        "node.reactor",
    },
    "drivers": {"drivers.http2", "node.contract", "node.errors", "node.reactor", "node.sockets", "node.waiting"},
    "drivers.http2": {"node.http2"},
    "drivers.install": {"drivers.process.leash"},
    "drivers.process": {
        "drivers.json_text",
        *("drivers.install", "drivers.sockets"),
        *("node.contract", "node.errors", "node.logs", "node.reactor"),
    },
    "drivers.sockets": {"node.contract", "node.errors", "node.logs", "node.reactor"},
    "drivers.xray": {
        *("drivers", "drivers.install.releases", "drivers.process", "drivers.sockets"),
        *("node.contract", "node.errors", "node.logs", "node.reactor", "node.waiting"),
    },
    "drivers.sing_box": {
        *("drivers", "drivers.install.releases", "drivers.process", "drivers.sockets"),
        *("node.contract", "node.errors", "node.logs", "node.reactor", "node.waiting"),
    },
    "protos": set(),
    "twisted.plugins": set(),
}
# The wiring: `tap` puts the node together, `registry` names the drivers.
WIRING = {"node.tap", "drivers.registry"}
# What a stage to try the node on takes of ours: what a controller has, and where cores are found.
STAGING = {"scripts.staging", "protos", "drivers.install", "node.client", "node.aio", "node.api.auth", "node.errors"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax trees of the product by module, without the generated ones."""
    paths = [path for top in ("node", "drivers", "protos", "twisted") for path in (ROOT / top).rglob("*.py")]
    return {name_of(path): ast.parse(path.read_text(), str(path)) for path in paths if not path.stem.endswith("_pb2")}


def imported(tree: ast.Module) -> Iterator[str]:
    """All that is imported anywhere in a module, by full name: `from a import b` is "a.b"."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, "relative imports hide where they point"
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def who_imports(*packages: str) -> set[str]:
    """The modules that import one of these, or anything in it."""
    return {
        name
        for name, tree in modules().items()
        if any(within(found, package) for found in imported(tree) for package in packages)
    }


@functools.cache
def own_imports(name: str) -> frozenset[str]:
    """The modules of ours that a module imports."""
    known = modules().keys() | {"protos.service_pb2", "protos.xray_pb2", "protos.sing_box_pb2", "protos.columns_pb2"}
    known |= {"protos.kept_pb2", "protos.handover_pb2"}
    found = set()
    for target in imported(modules()[name]):
        parts = target.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        if (module := next((prefix for prefix in prefixes if prefix in known), None)) is not None:
            found.add(module)
    return frozenset(found - {name})


def room(name: str) -> str:
    """The folder of a module."""
    return name if name in ROOMS else name.rpartition(".")[0]


def who_uses(matches: Callable[[ast.AST], bool]) -> set[str]:
    """The modules that have such a node in their syntax tree."""
    return {name for name, tree in modules().items() if any(map(matches, ast.walk(tree)))}


def attribute(*names: str, of: str = "") -> Callable[[ast.AST], bool]:
    """Whether something is an attribute of one of these names, where `of` is given: of the thing of that name."""
    return lambda node: (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and (not of or (isinstance(node.value, ast.Name) and node.value.id == of))
    )


def test_the_product_is_read() -> None:
    """These tests look at the real modules."""
    assert {"node.tap", "node.api.operations", "drivers.process.child", "drivers.xray.config"} <= modules().keys()
    assert own_imports("node.tap") >= {"node.settings", "node.api.operations", "drivers.registry"}
    places = {"node": "node", "node.tap": "node", "node.backend.runner": "node.backend", "drivers.registry": "drivers"}
    assert {name: room(name) for name in places} == places


def test_every_room_has_its_row() -> None:
    """No module stands in a folder without a row, and each folder of ours says in words what lives there."""
    assert {room(name) for name in modules()} == ROOMS.keys()
    silent = {name for name, tree in modules().items() if name in ROOMS and not ast.get_docstring(tree)}
    assert silent <= {"protos"}


@pytest.mark.parametrize("name", sorted(modules().keys() - WIRING))
def test_who_may_enter_which_room(name: str) -> None:
    """A module imports its own room, and of the others what the row of its room says."""
    own = room(name)
    allowed = ROOMS[own] | {own, "protos"}
    foreign = {target for target in own_imports(name) if target not in allowed and room(target) not in allowed}
    assert foreign == set()


def test_no_circles() -> None:
    """No module imports itself by way of others."""

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done and name in modules():
            for target in own_imports(name):
                visit(target, (*path, name))
            done.add(name)

    done: set[str] = set()
    for name in modules():
        visit(name, ())


def test_transports_do_not_know_each_other() -> None:
    """REST and gRPC share what is behind them, nothing else."""
    rest = {"node.transport.rest", "node.transport.site", "node.transport.streams"}
    rpc = {"node.transport.rpc", "node.transport.serving", "node.transport.health"}
    for one, other in ((rest, rpc), (rpc, rest)):
        assert not {target for name in one for target in own_imports(name)} & other


def test_only_the_wiring_knows_which_cores_there_are() -> None:
    """The node knows what a driver is, not which ones there are; a new core is one line of the registry."""
    found = {(name, target) for name in modules() for target in own_imports(name) if within(name, "node")}
    drivers = {pair for pair in found if within(pair[1], "drivers") and not within(pair[1], "drivers.install")}
    assert drivers == {("node.tap", "drivers.registry")}
    # The command line installs cores.
    assert {name for name, target in found if within(target, "drivers.install")} == {"node.nodectl.cores"}


@functools.cache
def programs() -> dict[str, ast.Module]:
    """The syntax trees of `scripts/` by module, of commands without an ending too."""
    files = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix in ("", ".py")]
    texts = {path: path.read_text() for path in files}
    python = {path for path in files if path.suffix or texts[path].startswith("#!/usr/bin/env python")}
    return {name_of(path): ast.parse(texts[path], str(path)) for path in python}


@pytest.mark.parametrize("name", sorted(programs()))
def test_scripts_do_not_know_the_tests(name: str) -> None:
    """Nothing in `scripts/` imports a test; the stage knows neither who plays on it nor the inside of the node."""
    found = {
        target for target in imported(programs()[name]) if target.split(".")[0] in ROOMS.keys() | {"scripts", "tests"}
    }
    assert not {target for target in found if within(target, "tests")}
    if within(name, "scripts.staging"):
        assert not {target for target in found if not any(within(target, place) for place in STAGING)}


def test_the_scripts_are_read() -> None:
    """The rule above looks at the real ones."""
    assert {"scripts.demo", "scripts.docs", "scripts.bench.stage", "scripts.staging.node"} <= programs().keys()


def named(tree: ast.Module) -> Iterator[str]:
    """Every name, attribute and text of a module, documentation left out."""
    documentation = {
        id(body[0].value)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list) and body and isinstance(body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "value"):
            value = getattr(node, field, None)
            if isinstance(value, str) and id(node) not in documentation:
                yield value


@pytest.mark.parametrize("name", [name for name in modules() if within(name, "node") and name != "node.nodectl.kinds"])
def test_the_node_names_no_core(name: str) -> None:
    """But for the interface's own number of the default core, and settings of other nodes, no core is named.

    The command line is no part of the node: it has the names that its user says.
    """
    cores = [word for word in named(modules()[name]) if "xray" in word.lower() or "sing_box" in word.lower()]
    if name == "node.api.operations":
        cores = [word for word in cores if word != "XRAY"]
    if name == "node.deployed":
        cores = [word for word in cores if word not in deployed.NAMES and word not in deployed.NAMES.values()]
    assert cores == []


def test_the_registry_is_in_its_place() -> None:
    """REGISTRY is made in one place and has every package of a core: those with a driver."""

    def assigns(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == "REGISTRY" and isinstance(node.ctx, ast.Store)

    assert who_uses(assigns) == {"drivers.registry"}
    drivers = {name for name in modules() if within(name, "drivers") and name.endswith(".driver")}
    assert {target for target in own_imports("drivers.registry") if room(target) in ROOMS} >= drivers


# One place for each thing

OVER_REST = {"node.client.rest", "node.client.body", "node.client.way"}


@pytest.mark.parametrize(
    ("packages", "allowed"),
    [
        (["threading", "concurrent", "multiprocessing", "queue"], {"node.aio"}),
        (
            ["asyncio"],
            {"node.aio", "node.transport.rpc", "node.transport.serving", "node.transport.health", "node.client.rpc"},
        ),
        (["klein"], {"node.transport.rest"}),
        (
            ["twisted.web", "werkzeug"],
            {"node.transport.rest", "node.transport.site", "drivers.sing_box.live"} | OVER_REST,
        ),
        (["twisted.web.client"], {"drivers.sing_box.live"} | OVER_REST),
        (["treq"], {"node.client.rest"}),
        (
            ["grpc", "grpc_health", "grpc_reflection"],
            {"node.aio", "node.client.rpc", *(f"node.transport.{name}" for name in ("rpc", "health", "reflection"))},
        ),
        (
            ["psutil"],
            {
                "node.machine.interfaces",
                "node.machine.memory",
                "node.machine.system",
                "node.machine.usage",
                "node.certificate",
                "drivers.process.orphans",
            },
        ),
        (["prometheus_client"], {"node.metrics.families", "node.metrics.pages"}),
        (["subprocess"], {"drivers.install.install", "drivers.install.wheels"}),
        (["sqlite3"], {"node.state.database", "node.state.schema"}),
        (
            ["urllib.request", "http.client"],
            {
                *("drivers.install.archive", "drivers.install.fetch", "drivers.install.install", "node.ready"),
            },
        ),
        (
            ["click", "rich"],
            {name for name in modules() if within(name, "node.nodectl")},
        ),
        (["requests", "dotenv", "pickle", "marshal"], set()),
    ],
    ids=lambda names: " ".join(sorted(names)),
)
def test_who_may_import(packages: list[str], allowed: set[str]) -> None:
    """Threads, web, gRPC, processes and the network each are the business of a few modules."""
    assert who_imports(*packages) <= allowed


def test_who_spawns() -> None:
    """Cores are spawned in one place, which knows how not to fork; the leash, and an upgrade, become other programs."""
    assert who_uses(attribute("spawnProcess")) == {"drivers.process.spawn"}
    assert who_uses(attribute("fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp", of="os")) == set()
    becoming = {"drivers.process.leash", "node.upgrade.program", "node.upgrade.trampoline"}
    assert who_uses(attribute("execv", "execve", "execvp", "execl")) == becoming


def test_who_reads_the_environment() -> None:
    """The environment is read by the settings, and by programs of their own; the bridge sets gRPC's."""
    readers = who_uses(attribute("environ", "environb", "getenv", of="os"))
    programs = {"drivers.install.install", "node.nodectl.session", "node.upgrade.trampoline"}
    assert readers - programs == {"node.settings", "node.aio"}
    assert who_imports("os.environ", "os.getenv", "os.environb") == set()
    lines = ast.unparse(modules()["node.aio"]).splitlines()
    assert [line for line in lines if "environ" in line and not line.startswith(("'", '"'))] == [
        "os.environ.setdefault('GRPC_ENABLE_FORK_SUPPORT', '0')",
        "os.environ.setdefault('GRPC_VERBOSITY', 'NONE')",
        "os.environ.setdefault('GRPC_EXPERIMENTS', '-event_engine_client,-event_engine_listener,"
        "-event_engine_for_all_other_endpoints')",
    ]


def test_who_logs() -> None:
    """Every log is written by the logger that makes texts of others printable."""
    assert who_imports("twisted.logger", "logging") == {"node.logs", "node.log_lines"}


def test_who_crosses_threads() -> None:
    """Only the bridge hands work to another thread's loop; beside it stand the reactor's pool and a signal handler."""
    assert who_uses(attribute("call_soon_threadsafe", "run_coroutine_threadsafe")) == {"node.aio"}
    assert who_uses(attribute("callFromThread", "blockingCallFromThread")) <= {"node.aio", "node.tap"}


def test_the_plugin_directory_is_no_package() -> None:
    """Twisted finds plugins of several projects only where none claims the directory."""
    assert {path.name for path in (ROOT / "twisted").rglob("*.py")} == {"node_plugin.py"}


def test_no_module_for_everything() -> None:
    """There is no place for what has none."""
    assert not [name for name in modules() if name.rsplit(".", 1)[-1] in ("utils", "util", "helpers", "common", "misc")]


def test_every_package_is_in_what_is_installed() -> None:
    """A folder of modules that setup.cfg does not name is in a clone, and not in a wheel."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    tops = ("node", "drivers", "protos", "twisted/plugins")
    folders = {path.parent for top in tops for path in (ROOT / top).rglob("*.py")}
    assert sorted(listed) == sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)
