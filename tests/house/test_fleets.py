"""deploy/ansible, deploy/helm and deploy/nomad: named things exist, and they agree with the node and each other.

That the engines take them is shown by tests/machine/test_fleets_*.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivers.install.releases import CORES
from node.command_line import SETTINGS

DEPLOY = Path(__file__).parents[2] / "deploy"
ROLE = DEPLOY / "ansible" / "roles" / "txnode"
CHART = DEPLOY / "helm" / "txnode"
JOB = DEPLOY / "nomad" / "txnode.nomad.hcl"

NAMES = {setting.name for setting in SETTINGS}
DEFAULTS = {setting.name: setting.default for setting in SETTINGS}
# Settings that the role and the chart set by variables of their own.
_ROLES = {"API_KEY", "STATE_DIR"}
_CHARTS = {
    *("API_KEY", "API_KEY_FILE", "API_KEYS_FILE", "SSL_CERT_FILE", "SSL_KEY_FILE", "SSL_SANS", "STATE_DIR"),
    *("REST_PORT", "GRPC_PORT", "SERVICE_PORT", "SERVICE_PROTOCOL"),
}
# The user of the image.
_USER = 65532


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def role(part: str) -> Any:
    return read(ROLE / part / "main.yml")


def yamls() -> Iterator[Path]:
    yield from sorted((DEPLOY / "ansible").rglob("*.yml"))
    yield from (CHART / "Chart.yaml", CHART / "values.yaml")


@pytest.mark.parametrize("path", list(yamls()), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_files_are_yaml(path: Path) -> None:
    """Each file parses and is not empty."""
    assert read(path)


def test_the_role_takes_every_setting() -> None:
    """Add a new setting to txnode_known_settings, unless the role sets it by a variable of its own."""
    assert set(role("vars")["txnode_known_settings"]) == NAMES - _ROLES


def test_the_chart_takes_every_setting() -> None:
    """Add a new setting to the chart's schema, unless the chart sets it by a value of its own."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["settings"]["propertyNames"]["enum"]) == NAMES - _CHARTS
    assert read(CHART / "values.yaml")["settings"].keys() <= NAMES - _CHARTS


def test_settings_that_are_written_exist() -> None:
    """Names in the environment of chart and job are settings; HOST_ADDRESS is the chart's own."""
    chart = set(re.findall(r"^- name: ([A-Z_]+)$", (CHART / "templates" / "_helpers.tpl").read_text(), re.MULTILINE))
    assert chart - {"HOST_ADDRESS"} <= NAMES
    job = set(re.findall(r"^ +([A-Z_]+) += ", JOB.read_text(), re.MULTILINE))
    assert job
    assert job <= NAMES


def test_variables_of_the_role_are_described_and_used() -> None:
    """Each default has a specification and is used; each variable in the role's files is a default or defined there."""
    defaults, own = role("defaults").keys(), role("vars").keys()
    assert read(ROLE / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"].keys() == defaults
    texts = {path: path.read_text() for path in ROLE.rglob("*.*") if path.is_file()}
    registered = {name for text in texts.values() for name in re.findall(r"register: (\w+)", text)}
    local = {name for text in texts.values() for name in re.findall(r"^ +(txnode_\w+):", text, re.MULTILINE)}
    named = {name for text in texts.values() for name in re.findall(r"\btxnode_\w+", text)}
    assert named <= defaults | own | registered | local
    used = "".join(text for path, text in texts.items() if path.parent.name != "meta")
    assert all(len(re.findall(rf"\b{name}\b", used)) > 1 for name in defaults)


def test_handlers_that_are_notified_exist() -> None:
    """A notification without a handler would have no effect."""
    notified = {
        name
        for tasks in (ROLE / "tasks").glob("*.yml")
        for task in read(tasks)
        for name in ([task["notify"]] if isinstance(task.get("notify"), str) else task.get("notify", []))
    }
    chosen = {"{{ txnode_for_cores }}", "{{ txnode_for_version }}"}
    assert notified - chosen == {handler["name"] for handler in role("handlers")}


def test_the_role_installs_cores_that_are_known() -> None:
    """The defaults are the versions that `drivers.install` chooses."""
    assert {core["name"]: str(core["version"]) for core in role("defaults")["txnode_cores"]} == {
        name: pinned.release for name, (pinned, *_) in CORES.items()
    }


def test_the_role_has_the_places_of_the_unit() -> None:
    """The state, the settings and the directory of the cores are at the paths in the unit."""
    own, home = role("vars"), role("defaults")["txnode_home"]
    unit = (DEPLOY / "node.service").read_text()
    assert f"EnvironmentFile=-{own['txnode_settings_file']}\n" in unit
    assert f"STATE_DIR=%S/{Path(own['txnode_state']).name}\n" in unit
    assert f"TXNODE_CORES={own['txnode_core_directory'].replace('{{ txnode_home }}', home)}\n" in unit
    assert f"ExecStart={home}/.venv/bin/twistd" in unit
    assert Path(own["txnode_unit"]).name == "node.service"


def test_values_that_templates_name_exist() -> None:
    """Each path after .Values, or after $v, exists in values.yaml."""
    values = read(CHART / "values.yaml")
    for template in (CHART / "templates").iterdir():
        for path in re.findall(r"(?:\.Values|\$v)\.([\w.]+)", template.read_text()):
            assert _has(values, path.split(".")), f"{template.name}: {path}"


def _has(values: Mapping[str, Any], path: list[str]) -> bool:
    first, *rest = path
    return first in values and (not rest or _has(values[first], rest))


def test_ports_agree() -> None:
    """All have the node's default ports."""
    assert {f"{name.upper()}_PORT": str(port) for name, port in read(CHART / "values.yaml")["ports"].items()} == {
        name: DEFAULTS[name] for name in ("REST_PORT", "GRPC_PORT")
    }
    for name in ("REST_PORT", "GRPC_PORT"):
        block = re.search(rf'variable "{name.lower()}" {{(.*?)^}}', JOB.read_text(), re.DOTALL | re.MULTILINE)
        assert block
        assert re.search(rf"default = {DEFAULTS[name]}$", block[1], re.MULTILINE)
    assert f"default({DEFAULTS['REST_PORT']})" in role("defaults")["txnode_ready_url"]


def test_users_agree() -> None:
    """The image, the chart and the job use the same user, who owns the secrets, and the same path of the state."""
    image = (DEPLOY / "Containerfile").read_text()
    assert f"USER {_USER}:{_USER}\n" in image
    [state] = re.findall(r"STATE_DIR=(\S+)", image)
    assert f"mountPath: {state}\n" in (CHART / "templates" / "daemonset.yaml").read_text()
    assert f'destination = "{state}"' in JOB.read_text()
    assert read(CHART / "values.yaml")["securityContext"]["user"] == _USER
    assert set(re.findall(r"\b(?:user|uid|gid) += \"?(\d+)", JOB.read_text())) == {str(_USER)}


def test_a_stop_has_enough_time() -> None:
    """A node has 20 seconds under systemd; the chart and the job give it more."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    [unit] = re.findall(r"^TimeoutStopSec=(\d+)$", (DEPLOY / "node.service").read_text(), re.MULTILINE)
    assert schema["properties"]["stopSeconds"]["minimum"] == int(unit)
    assert read(CHART / "values.yaml")["stopSeconds"] > int(unit)
    [job] = re.findall(r"kill_timeout = \"(\d+)s\"", JOB.read_text())
    assert int(job) > int(unit)
