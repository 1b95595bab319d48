"""The step of .github/workflows/release.yml that names images, with a docker that records its calls, and jq."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.house.test_workflows import commands, run_step

pytestmark = pytest.mark.machine


@pytest.mark.parametrize(
    ("there", "newest", "named"),
    [
        ("", "v1.2.0", ["1.2.0", "latest"]),
        ("", "v2.0.0", ["1.2.0"]),
        ("sha256:a sha256:b", "v1.2.0", ["1.2.0", "latest"]),
        ("sha256:a sha256:c", "v1.2.0", []),
    ],
)
def test_the_names_of_an_image(tmp_path: Path, there: str, newest: str, named: list[str]) -> None:
    """A patch of an older release does not become `latest`; a moved tag does not replace an image, a second try may."""
    docker = tmp_path / "docker"
    manifests = ",".join(f'{{"digest": "{each}"}}' for each in there.split())
    docker.write_text(
        f"""#!/bin/sh
        case "$*" in
        *--raw*) [ -n '{there}' ] && echo '{{"manifests": [{manifests}]}}' ;;
        *inspect*) echo '{{"digest": "sha256:both"}}' ;;
        *create*) printf '%s\n' "$@" >{tmp_path}/created ;;
        esac
        """
    )
    docker.chmod(0o755)
    (tmp_path / "cosign").symlink_to("/bin/true")
    [command] = [command for job, command in commands() if job.name == "sign" and "imagetools" in command]
    done = run_step(
        command,
        tmp_path,
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        GITHUB_REPOSITORY="Owner/txnode",
        GITHUB_REF_NAME="v1.2.0",
        GITHUB_OUTPUT=str(tmp_path / "output"),
        AMD64="sha256:b",
        ARM64="sha256:a",
        NEWEST=newest,
    )
    assert (done.returncode == 0) is bool(named), done.stdout + done.stderr
    created = (tmp_path / "created").read_text().split() if named else []
    image = "ghcr.io/owner/txnode"
    assert [word.removeprefix(f"{image}:") for word in created if word.startswith(f"{image}:")] == named
    assert not named or created[-2:] == [f"{image}@sha256:b", f"{image}@sha256:a"]
    assert named or "Make another version" in done.stdout
