"""deploy/: the lock has all requirements of setup.cfg, and images have time to stop."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.test_unit_file import UNIT, parse

ROOT = Path(__file__).parents[2]


def _required() -> list[Requirement]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["options"]["install_requires"].splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _locked() -> dict[str, str]:
    """The version of each package in the lock."""
    text = (ROOT / "deploy" / "requirements.txt").read_text()
    return {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    }


@pytest.mark.parametrize("requirement", _required(), ids=str)
def test_a_server_gets_what_is_required(requirement: Requirement) -> None:
    """Otherwise no server could be installed; to update the lock, run scripts/lock."""
    version = _locked().get(canonicalize_name(requirement.name))
    assert version, f"{requirement} is not in deploy/requirements.txt: run scripts/lock"
    assert requirement.specifier.contains(version), f"the lock has {requirement.name} {version}: run scripts/lock"


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-sbom.txt"])
def test_all_of_a_lock_has_digests(name: str) -> None:
    """Each package has at least one digest."""
    packages = re.split(r"^(?=\w)", (ROOT / "deploy" / name).read_text(), flags=re.MULTILINE)[1:]
    assert packages
    assert all("--hash=sha256:" in package for package in packages)


def test_an_image_has_as_long_to_stop_as_the_unit() -> None:
    """At least as long: a container engine kills the node after that."""
    [seconds] = parse(UNIT.read_text())["Service"]["TimeoutStopSec"]
    found = re.search(r"stop_grace_period: (\d+)s", (ROOT / "deploy" / "compose.yaml").read_text())
    assert found
    assert int(found[1]) > int(seconds)
