"""The workflows of .github: pinned actions, no right that a job does not need, and commands that exist.

actionlint and zizmor check more; `tests.yml` runs them, and CONTRIBUTING.md says how to.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
_PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
_OWN = re.compile(r"\./\.github/workflows/(\w+\.yml)( # .*)?")
# What a job may be allowed beyond reading, by the file and the name of the job.
RIGHTS: Mapping[tuple[str, str], set[str]] = {
    ("docs.yml", "publish"): {"pages", "id-token"},
    ("release.yml", "image"): {"packages"},
    ("release.yml", "sign"): {"packages", "id-token", "attestations"},
    ("release.yml", "draft"): {"contents", "id-token", "attestations"},
    ("release.yml", "pypi"): {"id-token"},
}
_PATHS = re.compile(r"(?<![\w/.-])((?:\.ci|scripts|deploy|tests|docs)/[\w./-]*\w)")
_MODULES = re.compile(r"-m (scripts\.[\w.]+)")


class Job(NamedTuple):
    """A job of a workflow."""

    file: str
    name: str
    text: dict[str, Any]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return list(self.text.get("steps", []))


def workflow(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def jobs() -> Iterator[Job]:
    for path in FILES:
        for name, text in workflow(path)["jobs"].items():
            yield Job(path.name, name, text)


def commands() -> Iterator[tuple[Job, str]]:
    """The shell commands of all steps."""
    yield from ((job, step["run"]) for job in jobs() for step in job.steps if "run" in step)


def test_the_workflows_are_read() -> None:
    assert {"tests.yml", "nightly.yml"} <= {path.name for path in FILES}
    assert any(job.steps for job in jobs()) and any(True for _ in commands())


def test_actions_are_pinned() -> None:
    """By the digest of a commit, with its version beside it, the same one everywhere: an owner can move a tag."""
    used: dict[str, set[str]] = {}
    for path in FILES:
        for what in re.findall(r"^[ -]*uses: (.*)$", path.read_text(), re.MULTILINE):
            if own := _OWN.fullmatch(what):
                assert (path.parent / own[1]).exists(), what
                continue
            assert _PINNED.fullmatch(what), f"{path.name}: {what}"
            used.setdefault(what.partition("@")[0], set()).add(what)
    assert used and not {name: pins for name, pins in used.items() if len(pins) > 1}


def test_rights() -> None:
    """A workflow has none, and each job names its own: to read, unless the table above says more."""
    for path in FILES:
        assert workflow(path)["permissions"] == {}, path.name
    for job in jobs():
        rights = job.text["permissions"]
        assert isinstance(rights, dict) and set(rights.values()) <= {"read", "write"}, job
        more = {right for right, kind in rights.items() if kind == "write"}
        assert more == RIGHTS.get((job.file, job.name), set()), (job.file, job.name)
        assert rights.keys() - more <= {"contents"}, (job.file, job.name)


def test_the_table_of_rights_has_only_jobs() -> None:
    there = {(job.file, job.name) for job in jobs()}
    assert {row for row in RIGHTS if row[0] in {path.name for path in FILES}} <= there


def test_jobs_end_and_do_not_pile_up() -> None:
    """Each job has a limit of time, and a named version of Ubuntu; each workflow says which runs exclude others."""
    for path in FILES:
        assert workflow(path)["concurrency"]["group"], path.name
    for job in jobs():
        assert job.text["name"], job
        if "uses" not in job.text:
            assert 0 < job.text["timeout-minutes"] <= 355, (job.file, job.name)
            machines = [job.text["runs-on"], *(row.get("runner") for row in _rows(job))]
            assert all(
                re.fullmatch(r"ubuntu-\d\d\.04(-arm)?|\$\{\{ matrix\.runner \}\}", each) for each in machines if each
            )


def _rows(job: Job) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = job.text.get("strategy", {}).get("matrix", {}).get("include", [])
    return rows


def test_a_clone_has_no_token() -> None:
    """A test, or a dependency, must not find one in .git."""
    clones = [step for job in jobs() for step in job.steps if step.get("uses", "").startswith("actions/checkout@")]
    assert clones and all(step["with"]["persist-credentials"] is False for step in clones)


def test_no_text_of_others_is_a_command() -> None:
    """An expression would be put into the script; a variable of the environment is only text."""
    assert [command for _, command in commands() if "${{" in command] == []


def test_nothing_is_cached() -> None:
    """A cache that one run writes would be code in another one, which may have more rights."""
    for job in jobs():
        for step in job.steps:
            assert not step.get("uses", "").startswith("actions/cache"), job.name
            given = step.get("with", {})
            assert not given.get("cache"), job.name
            if step.get("uses", "").startswith("actions/setup-go@"):
                assert given["cache"] is False, "its default is a cache"


def test_a_workflow_of_strangers_is_harmless() -> None:
    """`pull_request_target` and `workflow_run` would give a stranger's code the rights of this repository."""
    for path in FILES:
        # YAML 1.1 takes the word `on` for true.
        assert not {"pull_request_target", "workflow_run", "issue_comment"} & set(workflow(path)[True]), path.name


def run_step(command: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does."""
    return subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=directory,
        env={"PATH": os.environ["PATH"]} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_files_of_another_job_are_refused(tmp_path: Path) -> None:
    """Each job that takes the files of a release compares them with what the job that made them says."""
    takers = [job for job in jobs() for step in job.steps if step.get("with", {}).get("path") == "release"]
    checks = [
        (job.name, step["run"]) for job in takers for step in job.steps if step.get("working-directory") == "release"
    ]
    assert [name for name, _ in checks] == ["image", "draft", "pypi"]
    [command] = {command for _, command in checks}
    (tmp_path / "wheel").write_text("1")
    sums = f"{hashlib.sha256(b'1').hexdigest()}  wheel\n"
    (tmp_path / "SHA256SUMS").write_text(sums)
    made = hashlib.sha256(sums.encode()).hexdigest()
    assert run_step(command, tmp_path, SUMS=made).returncode == 0
    assert run_step(command, tmp_path, SUMS="").returncode
    (tmp_path / "more").touch()
    assert run_step(command, tmp_path, SUMS=made).returncode
    (tmp_path / "more").unlink()
    (tmp_path / "wheel").write_text("2")
    assert run_step(command, tmp_path, SUMS=made).returncode
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(b'2').hexdigest()}  wheel\n")
    assert run_step(command, tmp_path, SUMS=made).returncode


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_run_exists(path: Path) -> None:
    """Every script, file and module of this repository that a command names."""
    for job, command in commands():
        if job.file == path.name:
            assert [each for each in _PATHS.findall(command) if not (ROOT / each).exists()] == [], command
            for module in _MODULES.findall(command):
                assert (ROOT / f"{module.replace('.', '/')}.py").exists(), command


def test_how_to_check_them() -> None:
    """CONTRIBUTING.md has the commands of the job that checks the workflows."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    checks = [command for job, command in commands() if job.name == "workflows"]
    assert checks and [command for command in checks if command not in text] == []


def test_newer_actions_wait_some_days() -> None:
    """Dependabot proposes newer ones, and newer packages, but not on the day of their release."""
    found = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())
    assert {update["package-ecosystem"] for update in found["updates"]} == {"github-actions", "pip"}
    assert all(update["cooldown"]["default-days"] >= 7 for update in found["updates"])
