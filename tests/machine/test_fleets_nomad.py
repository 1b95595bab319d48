"""deploy/nomad, checked with Nomad's own job parser: a Go module, which needs neither an agent nor a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.tools import MAKING, run, tools

_JOB = Path(__file__).parents[2] / "deploy" / "nomad" / "txnode.nomad.hcl"
_PARSE = """
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/hashicorp/nomad/jobspec2"
)

func main() {
	text, err := os.ReadFile(os.Args[1])
	if err == nil {
		var job any
		job, err = jobspec2.ParseWithConfig(
			&jobspec2.ParseConfig{Path: os.Args[1], Body: text, Strict: true, ArgVars: os.Args[2:]})
		if err == nil {
			err = json.NewEncoder(os.Stdout).Encode(job)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
"""
_STEPS = (
    # Nomad itself is built with these replacements.
    ("mod", "edit", "-replace", "github.com/hashicorp/hcl=github.com/hashicorp/hcl@v1.0.1-nomad-1"),
    ("get", "github.com/hashicorp/nomad@v1.11.0"),
    ("get", "github.com/hashicorp/nomad/api@v0.0.0-20260907080526-08ef8f3d26da"),
)

pytestmark = [pytest.mark.machine, pytest.mark.timeout(MAKING)]


@pytest.fixture(scope="module")
def parser() -> Iterator[Path]:
    with tools() as made:
        yield made.go_program("nomad-parse", _PARSE, *_STEPS)


def parse(parser: Path, *variables: str, job: Path = _JOB) -> Any:
    """The job's only group, as Nomad parses it."""
    [group] = json.loads(run([parser, job, *variables]))["TaskGroups"]
    return group


def test_nomad_takes_it(parser: Path) -> None:
    """The host's network, no capabilities, a read-only root, and secrets that are reloaded without a restart."""
    group = parse(parser)
    [task] = group["Tasks"]
    assert group["Networks"][0]["Mode"] == "host"
    config = task["Config"]
    assert (config["readonly_rootfs"], config["cap_drop"], config["cap_add"]) == (True, ["all"], [])
    assert {template["ChangeSignal"] for template in task["Templates"]} == {"SIGHUP"}
    checks = {check["Path"]: check["CheckRestart"] for check in group["Services"][0]["Checks"]}
    assert checks.keys() == {"/livez", "/readyz"}
    assert checks["/readyz"] is None


def test_variables_arrive(parser: Path) -> None:
    """Variables cannot override settings of the job itself; a certificate becomes a file of the task."""
    given = ("rest_port=8443", "drain_seconds=60", "certificate=true", "drop_nobody=true", 'settings={RESUME="off"}')
    group = parse(parser, *given)
    [task] = group["Tasks"]
    assert {port["Label"]: port["Value"] for port in group["Networks"][0]["ReservedPorts"]}["rest"] == 8443
    assert group["ShutdownDelay"] == 60 * 10**9
    assert task["Config"]["cap_add"] == ["sys_ptrace"]
    assert task["Env"]["RESUME"] == "off"
    files = {f"${{NOMAD_SECRETS_DIR}}/{Path(template['DestPath']).name}" for template in task["Templates"]}
    assert files == {task["Env"][name] for name in ("API_KEYS_FILE", "SSL_CERT_FILE", "SSL_KEY_FILE")}


def test_the_parser_refuses_what_nomad_does_not_have(parser: Path, tmp_path: Path) -> None:
    """The parser refuses an unknown key, so that the other tests can fail."""
    wrong = tmp_path / "wrong.nomad.hcl"
    wrong.write_text(_JOB.read_text().replace("kill_timeout", "kill_timeot"))
    with pytest.raises(AssertionError, match="kill_timeot"):
        parse(parser, job=wrong)
