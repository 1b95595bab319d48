"""deploy/node.service: the directives that the node relies on are there and fit each other."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path, PurePosixPath

import pytest

UNIT = Path(__file__).parents[2] / "deploy" / "node.service"
SPECIFIERS = {"%S": "/var/lib", "%C": "/var/cache"}  # systemd.unit(5), for system services


def parse(text: str) -> dict[str, dict[str, list[str]]]:
    """Sections, directives and all values of each. Raises ValueError for any other line."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), defaultdict(list))
            continue
        name, found, value = line.partition("=")
        if not found or name != name.strip():
            raise ValueError(line)
        current[name].append(value)
    return sections


@pytest.fixture
def service() -> dict[str, list[str]]:
    return parse(UNIT.read_text())["Service"]


def environment(service: dict[str, list[str]]) -> dict[str, str]:
    variables = dict(value.split("=", 1) for value in service["Environment"])
    for name, value in variables.items():
        for specifier, path in SPECIFIERS.items():
            variables[name] = variables[name].replace(specifier, path) if specifier in value else variables[name]
    return variables


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Type", "notify"),
        ("NotifyAccess", "main"),
        ("Restart", "on-failure"),
        ("WatchdogSec", "30"),
        ("TimeoutStopSec", "20"),
        ("KillMode", "mixed"),
        ("SuccessExitStatus", "143"),
        ("RestartForceExitStatus", "SIGHUP SIGUSR2"),
        ("OOMPolicy", "continue"),
        ("LimitNOFILE", "1048576"),
        ("LimitCORE", "0"),
        ("MemoryMax", "90%"),
        ("ProtectProc", "invisible"),
        ("DynamicUser", "yes"),
        ("UMask", "0077"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("PrivateTmp", "yes"),
        ("PrivateDevices", "yes"),
        ("AmbientCapabilities", "CAP_NET_BIND_SERVICE"),
        ("CapabilityBoundingSet", "CAP_NET_BIND_SERVICE"),
        ("EnvironmentFile", "-/etc/txnode/node.env"),
        ("ExecStart", "/opt/txnode/.venv/bin/twistd --nodaemon --pidfile= node"),
        ("ExecReload", "/bin/sh -c 'kill -USR2 ${MAINPID}'"),
    ],
)
def test_a_directive_says_this_and_only_this(service: dict[str, list[str]], name: str, value: str) -> None:
    """The directive occurs once, with this value."""
    assert service[name] == [value]


@pytest.mark.parametrize(
    "name", ["MemoryDenyWriteExecute", "ProcSubset", "PrivateUsers", "PrivateNetwork", "NoExecPaths", "RootDirectory"]
)
def test_directives_that_break_the_node_or_a_core_are_absent(service: dict[str, list[str]], name: str) -> None:
    """Each of these would break a core, its ports below 1024, or the statistics."""
    assert name not in service


def test_connections_of_one_user_can_be_cut(service: dict[str, list[str]]) -> None:
    """The filter adds calls that @system-service lacks, removes unneeded ones, and refuses with an error."""
    landlock = {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"}
    given, taken = service["SystemCallFilter"]
    assert set(given.split()) == {"@system-service", "pidfd_getfd", *landlock}
    assert taken.split() == ["~@privileged", "@resources"]
    assert service["SystemCallErrorNumber"] == ["EPERM"]


def test_the_address_families_are_those_in_use(service: dict[str, list[str]]) -> None:
    """IPv4, IPv6, unix sockets of the core and systemd, and netlink."""
    [families] = service["RestrictAddressFamilies"]
    assert set(families.split()) == {"AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"}


def test_the_state_is_where_the_node_may_write(service: dict[str, list[str]]) -> None:
    """STATE_DIR is the directory made by StateDirectory, only for the service's user."""
    assert environment(service)["STATE_DIR"] == f"/var/lib/{service['StateDirectory'][0]}"
    assert service["StateDirectoryMode"] == ["0700"]


def test_executables_are_where_the_node_cannot_write(service: dict[str, list[str]]) -> None:
    """The cores are beside the virtual environment, where the service can read but not write."""
    cores = PurePosixPath(environment(service)["TXNODE_CORES"])
    prefix = PurePosixPath(service["ExecStart"][0].split()[0]).parents[2]
    assert cores.is_relative_to(prefix)
    for hidden in ("/home", "/root", "/run/user", "/tmp", "/var/tmp", environment(service)["STATE_DIR"]):
        assert not cores.is_relative_to(hidden)
    assert "ReadWritePaths" not in service


def test_what_an_operator_sets_wins(service: dict[str, list[str]]) -> None:
    """Variables in the file override the unit's; the file may be missing."""
    assert all(value.startswith("-/etc/txnode/") for value in service["EnvironmentFile"])


def test_the_comments_name_the_same_places(service: dict[str, list[str]]) -> None:
    """The commands in the unit's head use the same paths as its directives."""
    head = UNIT.read_text().partition("[Unit]")[0]
    assert f"TXNODE_CORES={environment(service)['TXNODE_CORES']} " in head
    assert service["EnvironmentFile"][0].removeprefix("-") in head
    assert str(PurePosixPath(service["ExecStart"][0].split()[0]).parents[1]) in head


def test_an_instance_shares_nothing_with_the_first_node(service: dict[str, list[str]]) -> None:
    """The drop-in replaces each of the unit's values that names the node's own user or files."""
    own = parse(UNIT.with_name("node@.conf").read_text())["Service"]
    named = {name for name, values in service.items() if re.search(r"%S/txnode|node\.env|^txnode$", "\n".join(values))}
    assert named == {"Environment", "EnvironmentFile", "StateDirectory"}
    assert environment(own)["STATE_DIR"] == "/var/lib/txnode-%i" == f"/var/lib/{own['StateDirectory'][-1]}"
    assert (own["EnvironmentFile"], own["StateDirectory"][0]) == (["", "/etc/txnode/%i.env"], "")
    assert own["User"] == ["txnode-%i"]
