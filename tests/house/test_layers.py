"""The architecture, checked on syntax trees: imports point one way, and each dangerous thing has a single place."""

from __future__ import annotations

import ast
import configparser
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What modules of each room may import of this project, besides their own room and `EVERYWHERE`: rooms or modules.
ROOMS: dict[str, set[str]] = {
    "node": {
        *(
            "node.abuse.options",
            "node.backend.options",
            "node.door.options",
            "node.handover.options",
            "node.keys.options",
        ),
        *("node.limits.allowance", "node.limits.options", "node.metrics.options", "node.state.directory"),
        *("node.traffic.options", "node.updates.policy"),
    },
    "node.bill": {"node.contract", "node.limits", "node.machine", "node.state", "node.traffic"},
    "node.base": set(),
    "node.keys": {"node.settings"},
    "node.contract": set(),
    "node.machine": set(),
    "node.state": {"node.contract"},
    "node.traffic": {"node.contract", "node.state"},
    "node.backend": {"node.contract", "node.events", "node.machine", "node.state"},
    "node.handover": {
        *("node", "node.contract", "node.engine.leaving", "node.events", "node.machine.systemd", "node.state.store"),
    },
    "node.engine": {
        *("node.backend", "node.bill", "node.contract", "node.events", "node.limits", "node.state", "node.traffic"),
    },
    "node.api": {
        *("node", "node.backend", "node.contract", "node.engine", "node.events", "node.keys", "node.machine"),
    },
    "node.abuse": {"node.contract", "node.events", "node.limits"},
    "node.limits": {
        *("node.backend", "node.contract", "node.events", "node.machine", "node.state", "node.traffic"),
    },
    "node.clock": {"node.events"},
    "node.doctor": {"node.certificate", "node.machine.mechanisms", "node.settings", "node.state"},
    "node.events": {"node", "node.contract"},
    "node.metrics": {
        *("node", "node.api.pages", "node.backend", "node.contract", "node.engine", "node.machine", "node.state"),
    },
    "node.door": {"node.api", "node.contract.keeper", "node.http2", "node.keys.keyfile", "node.machine.peer_user"},
    "node.http2": set(),
    "node.updates": {
        *("node", "node.api.pages", "node.backend", "node.contract", "node.events", "node.handover.upgrade"),
    },
    "node.client": {"node.api", "node.keys.keyfile"},
    "node.nodectl": {
        *("node", "node.certificate", "node.client", "node.doctor", "node.contract", "node.settings"),
    },
    "node.nodectl.commands": {
        *("node.certificate", "node.client", "node.doctor", "node.keys", "node.limits.parsing", "node.limits.periods"),
        *("node.nodectl", "node.sandbox", "node.settings", "drivers.install"),
    },
    "drivers": set(),
    "drivers.install": set(),
    "drivers.pretended": {"drivers.process", "node.contract"},
    "drivers.process": {"drivers.install", "drivers.sockets", "node.contract", "node.http2"},
    "drivers.sockets": {"node.contract"},
    "drivers.xray": {
        *("drivers.install.releases", "drivers.process", "drivers.sockets"),
        "node.contract",
    },
    "drivers.sing_box": {"drivers.install.releases", "drivers.process", "drivers.sockets", "node.contract"},
    "protos": set(),
    "twisted.plugins": {"node.handover.launch"},
}
# What every room may import.
EVERYWHERE = {"node.base", "protos"}
# The wiring: `tap` puts the node together, `service` runs it, `sandbox` runs one with pretended cores, `settings`
# collects settings, `registry` names drivers.
WIRING = {"node.tap", "node.service", "node.sandbox", "node.command_line", "node.settings", "drivers.registry"}
# Packages: the one of the node has its version, the others nothing.
HEADS = {"node", "drivers", "twisted"}
# What the test stage may import: what a controller has, the search for cores, and the file of the version.
STAGING = {
    "scripts.staging",
    "scripts.packaging.version",
    "protos",
    "drivers.install",
    "node.client",
    "node.base.aio",
    "node.api.auth",
    "node.base.errors",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax trees of the product by module, without the generated ones."""
    paths = [path for top in ("node", "drivers", "protos", "twisted") for path in (ROOT / top).rglob("*.py")]
    return {name_of(path): ast.parse(path.read_text(), str(path)) for path in paths if not path.stem.endswith("_pb2")}


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Every node of a syntax tree, walked once."""
    return tuple(ast.walk(tree))


def imported(tree: ast.Module) -> Iterator[str]:
    """All imports anywhere in a module, by full name: `from a import b` is "a.b"."""
    for statement in nodes(tree):
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
    """The modules of this project that a module imports."""
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
    return {name for name, tree in modules().items() if any(map(matches, nodes(tree)))}


def attribute(*names: str, of: str = "") -> Callable[[ast.AST], bool]:
    """Whether a node is an attribute with one of these names; with `of`, of the object of that name."""
    return lambda node: (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and (not of or (isinstance(node.value, ast.Name) and node.value.id == of))
    )


def test_the_product_is_read() -> None:
    """These tests read the real modules."""
    assert {"node.tap", "node.api.operations", "drivers.process.child", "drivers.xray.config"} <= modules().keys()
    assert own_imports("node.tap") >= {"node.settings", "node.api.operations", "drivers.registry"}
    places = {"node": "node", "node.tap": "node", "node.backend.runner": "node.backend", "drivers.registry": "drivers"}
    assert {name: room(name) for name in places} == places


def test_every_room_has_its_row() -> None:
    """Every folder with modules has a row, and a docstring that says what is in it."""
    assert {room(name) for name in modules()} == ROOMS.keys()
    silent = {name for name, tree in modules().items() if name in ROOMS and not ast.get_docstring(tree)}
    assert silent <= {"protos"}


def test_imports_between_rooms() -> None:
    """A module imports only its own room, and what the row of its room allows."""
    foreign = {name: entered for name in modules().keys() - WIRING if (entered := _entered(name))}
    assert foreign == {}


def _entered(name: str) -> set[str]:
    """The imports of a module that are not allowed."""
    own = room(name)
    allowed = ROOMS[own] | {own} | EVERYWHERE
    return {target for target in own_imports(name) if target not in allowed and room(target) not in allowed}


def test_no_circles() -> None:
    """No module imports itself through others."""

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done and name in modules():
            for target in own_imports(name):
                visit(target, (*path, name))
            done.add(name)

    done: set[str] = set()
    for name in modules():
        visit(name, ())


def folder(name: str) -> str:
    """The folder that has a module; folders inside a room of several are that room."""
    inside = name if (ROOT / name.replace(".", "/")).is_dir() else name.rpartition(".")[0]
    return ".".join(inside.split(".")[:2])


def arrows() -> dict[str, set[str]]:
    """The folders that each folder imports, without what every room may import, and without the wiring."""
    found: dict[str, set[str]] = {folder(name): set() for name in modules().keys() - WIRING - HEADS}
    for name in modules().keys() - WIRING - HEADS:
        found[folder(name)] |= {folder(target) for target in own_imports(name) if target not in HEADS}
    return {name: targets - EVERYWHERE - {name} for name, targets in found.items() if name not in EVERYWHERE}


def floors() -> dict[str, int]:
    """The floor of each folder: a folder is above all that it imports."""
    below = arrows()

    @functools.cache
    def floor(name: str) -> int:
        return 1 + max((floor(target) for target in below[name]), default=0)

    return {name: floor(name) for name in below}


def test_no_two_folders_import_each_other() -> None:
    """No folder imports itself through others: each can be understood with those below it alone."""
    below = arrows()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for target in below[name]:
                visit(target, (*path, name))
            done.add(name)

    done: set[str] = set()
    for name in below:
        visit(name, ())


def test_transports_do_not_know_each_other() -> None:
    """REST and gRPC share only the modules behind them."""
    rest = {"node.door.rest", "node.door.site"}
    rpc = {"node.door.rpc", "node.door.rpc_calls"}
    for one, other in ((rest, rpc), (rpc, rest)):
        assert not {target for name in one for target in own_imports(name)} & other


def test_only_the_wiring_knows_which_cores_there_are() -> None:
    """The node knows the protocol of drivers, not the drivers; a new core is one line in the registry."""
    found = {(name, target) for name in modules() for target in own_imports(name) if within(name, "node")}
    drivers = {pair for pair in found if within(pair[1], "drivers") and not within(pair[1], "drivers.install")}
    assert drivers == {(f"node.{name}", "drivers.registry") for name in ("tap", "sandbox", "command_line")}
    # The command line installs cores.
    assert {name for name, target in found if within(target, "drivers.install")} == {"node.nodectl.commands.core"}


@functools.cache
def programs() -> dict[str, ast.Module]:
    """The syntax trees of `scripts/` by module, of commands without an ending too."""
    files = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix in ("", ".py")]
    texts = {path: path.read_text() for path in files}
    python = {path for path in files if path.suffix or texts[path].startswith("#!/usr/bin/env python")}
    return {name_of(path): ast.parse(texts[path], str(path)) for path in python}


def test_scripts_do_not_know_the_tests() -> None:
    """`scripts/` imports no tests; the stage imports neither its users nor the inside of the node."""
    ours = ROOMS.keys() | {"scripts", "tests"}
    found = {
        (name, target) for name, tree in programs().items() for target in imported(tree) if target.split(".")[0] in ours
    }
    assert not {pair for pair in found if within(pair[1], "tests")}
    staged = {pair for pair in found if within(pair[0], "scripts.staging")}
    assert not {pair for pair in staged if not any(within(pair[1], place) for place in STAGING)}


def test_the_scripts_are_read() -> None:
    """The test above reads the real scripts."""
    assert {"scripts.demo", "scripts.docs", "scripts.bench.stage", "scripts.staging.node"} <= programs().keys()


def named(tree: ast.Module) -> Iterator[str]:
    """Every name, attribute and string of a module, without docstrings."""
    documentation = {
        id(body[0].value)
        for node in nodes(tree)
        if isinstance(body := getattr(node, "body", None), list) and body and isinstance(body[0], ast.Expr)
    }
    for node in nodes(tree):
        for field in ("id", "attr", "name", "arg", "value"):
            value = getattr(node, field, None)
            if isinstance(value, str) and id(node) not in documentation:
                yield value


def test_the_node_names_no_core() -> None:
    """Except for the interface's number of the default core.

    The command line is not part of the node: its users give names of cores.
    """
    names = [name for name in modules() if within(name, "node") and name != "node.nodectl.commands.start"]
    assert {name: cores for name in names if (cores := _cores(name))} == {}


def _cores(name: str) -> list[str]:
    """Names of cores in the module that are not allowed."""
    cores = [word for word in named(modules()[name]) if "xray" in word.lower() or "sing_box" in word.lower()]
    if name == "node.api.operations":
        return [word for word in cores if word != "XRAY"]
    return cores


def test_the_registry_is_in_its_place() -> None:
    """REGISTRY is defined in one place, and has every package with a driver."""

    def assigns(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == "REGISTRY" and isinstance(node.ctx, ast.Store)

    assert who_uses(assigns) == {"drivers.registry"}
    drivers = {name for name in modules() if within(name, "drivers") and name.endswith(".driver")}
    assert {target for target in own_imports("drivers.registry") if room(target) in ROOMS} >= drivers


# One place for each thing

OVER_REST = {"node.client.rest"}


@pytest.mark.parametrize(
    ("packages", "allowed"),
    [
        # A lock of the keeper's sockets: threads of the pool use them, too.
        (
            ["threading", "concurrent", "multiprocessing", "queue"],
            {"node.base.aio", "node.base.pool", "node.handover.ties"},
        ),
        (
            ["asyncio"],
            {"node.base.aio", "node.door.rpc", "node.door.rpc_calls", "node.client.rpc"},
        ),
        (["klein"], {"node.door.rest"}),
        (
            ["twisted.web", "werkzeug"],
            {"node.door.rest", "node.door.site", "drivers.sing_box.ssm_api"} | OVER_REST,
        ),
        (["twisted.web.client"], {"drivers.sing_box.ssm_api"} | OVER_REST),
        (["treq"], {"node.client.rest"}),
        (
            ["grpc", "grpc_health", "grpc_reflection"],
            {"node.base.aio", "node.client.rpc", "node.door.rpc", "node.door.rpc_calls"},
        ),
        (
            ["psutil"],
            {
                "node.machine.interfaces",
                "node.machine.memory",
                "node.machine.system",
                "node.machine.usage",
                "node.certificate",
                "drivers.process.closed",
                "drivers.process.orphans",
            },
        ),
        (["prometheus_client"], {"node.metrics.families", "node.metrics.pages"}),
        (["subprocess"], {"drivers.install.install"}),
        (["sqlite3"], {"node.state.database", "node.state.schema"}),
        (
            ["urllib.request", "http.client"],
            {
                *("drivers.install.fetch", "node.ready"),
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
def test_modules_that_may_import(packages: list[str], allowed: set[str]) -> None:
    """Only a few modules may import threads, web, gRPC, processes and the network."""
    assert who_imports(*packages) <= allowed


def test_modules_that_spawn() -> None:
    """The keeper forks, and the process that becomes it; without it, and for commands, one place spawns."""
    assert who_uses(attribute("spawnProcess")) == {"drivers.process.spawn"}
    # A separate program, without threads; and before the node's modules are imported.
    assert who_uses(attribute("fork", of="os")) == {"node.handover.keeper", "node.handover.launch"}
    assert who_uses(attribute("forkpty", "system", "popen", "posix_spawn", "posix_spawnp", of="os")) == set()
    becoming = {"drivers.install.leash", "node.handover.keeper", "node.handover.launch"}
    assert who_uses(attribute("execv", "execve", "execvp", "execl")) == becoming


def test_modules_that_read_the_environment() -> None:
    """Only the settings and separate programs read the environment; the bridge sets gRPC's variables."""
    readers = who_uses(attribute("environ", "environb", "getenv", of="os"))
    programs = {"drivers.install.install", "node.nodectl.session"}
    programs |= {f"node.handover.{name}" for name in ("attempt", "keeper", "launch")}
    assert readers - programs == {"node.settings", "node.base.aio"}
    assert who_imports("os.environ", "os.getenv", "os.environb") == set()
    lines = ast.unparse(modules()["node.base.aio"]).splitlines()
    assert [line for line in lines if "environ" in line and not line.startswith(("'", '"'))] == [
        "os.environ.setdefault('GRPC_ENABLE_FORK_SUPPORT', '0')",
        "os.environ.setdefault('GRPC_VERBOSITY', 'NONE')",
        "os.environ.setdefault('GRPC_EXPERIMENTS', '-event_engine_client,-event_engine_listener,"
        "-event_engine_for_all_other_endpoints')",
    ]


def test_modules_that_log() -> None:
    """All logs go through the logger that escapes texts of others."""
    assert who_imports("twisted.logger", "logging") == {"node.base.logs", "node.log_lines"}


def test_modules_that_cross_threads() -> None:
    """Only the bridge passes work to another thread's loop, besides the reactor's pool and a signal handler."""
    assert who_uses(attribute("call_soon_threadsafe", "run_coroutine_threadsafe")) == {"node.base.aio"}
    assert who_uses(attribute("callFromThread", "blockingCallFromThread")) <= {"node.base.aio", "node.service"}


def test_the_plugin_directory_is_not_a_package() -> None:
    """Twisted finds plugins of several projects only if none has the directory as a package."""
    assert {path.name for path in (ROOT / "twisted").rglob("*.py")} == {"node_plugin.py"}


def test_no_utility_modules() -> None:
    """No module is called utils or the like."""
    assert not [name for name in modules() if name.rsplit(".", 1)[-1] in ("utils", "util", "helpers", "common", "misc")]


def test_every_package_is_in_what_is_installed() -> None:
    """A wheel lacks folders of modules that setup.cfg does not list."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    tops = ("node", "drivers", "protos", "twisted/plugins")
    folders = {path.parent for top in tops for path in (ROOT / top).rglob("*.py")}
    assert sorted(listed) == sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)


if __name__ == "__main__":
    rows = floors()
    print(f"{len(rows)} boxes on {max(rows.values())} floors, {sum(map(len, arrows().values()))} arrows")
    for name in sorted(rows, key=lambda name: (-rows[name], name)):
        print(f"{rows[name]:>2} {name}: {', '.join(sorted(arrows()[name]))}")
