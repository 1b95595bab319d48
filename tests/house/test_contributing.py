"""CONTRIBUTING.md stays true: its example of a live test passes. Hooks and forms beside it fit."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def _example() -> dict[str, Any]:
    """The module that CONTRIBUTING.md shows."""
    [block] = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    module: dict[str, Any] = {"__name__": __name__}
    exec(compile(block, "CONTRIBUTING.md", "exec"), module)
    return module


# In tests/live it has the mark by its place.
test_the_example = pytest.mark.core(_example()["test_a_removed_user_is_out"])


def test_every_marker_has_its_row() -> None:
    """The table of markers has those of setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    markers = re.findall(r"^(\w+):", config["tool:pytest"]["markers"], re.MULTILINE)
    assert markers
    assert sorted(markers) == sorted(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))


def test_the_hooks_are_what_the_tests_check() -> None:
    """.pre-commit-config.yaml runs the linters of scripts/test, with the same arguments; the formatter also writes."""
    checked = re.findall(
        r'^ +await labelled \S+ "\$python" -m (.+)$', (ROOT / "scripts" / "test").read_text(), re.MULTILINE
    )
    assert checked
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    python = """bash -c 'exec "${TXNODE_VENV:-.venv}/bin/python" -m """
    hooks = [hook["entry"].removeprefix(python).removesuffix("'") for hook in repository["hooks"]]
    assert hooks == [command.replace(" --check", "") for command in checked]


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_forms_have_what_github_asks_for(form: str) -> None:
    """Each form has a name and a description; its elements have a known type, their own id and a label."""
    document = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())
    assert document["name"] and document["description"]
    asked = [element for element in document["body"] if element["type"] != "markdown"]
    assert {element["type"] for element in asked} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({element["id"] for element in asked}) == len(asked)
    assert all(element["attributes"]["label"] for element in asked)
