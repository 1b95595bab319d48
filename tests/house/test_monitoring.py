"""deploy/ for monitoring: rules and the dashboard name only metrics that a node has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from node.metrics.families import FAMILIES, Kind
from tests.harness.monitoring import DASHBOARD, RULES, expressions, named

ROOT = Path(__file__).parents[2]
# The suffixes of a family's series, by kind.
_SUFFIXES = {Kind.HISTOGRAM: ("_bucket", "_count", "_sum")}
TOLD = {family.name + suffix for family in FAMILIES for suffix in _SUFFIXES.get(family.kind, ("",))}


@pytest.mark.parametrize("file", [RULES, DASHBOARD], ids=lambda file: file.name)
def test_metrics_exist(file: Path) -> None:
    """Each name in an expression is a metric of the node; both files have many."""
    names = {name for expression in expressions(file) for name in named(expression)}
    assert len(names) > 15
    assert names <= TOLD, names - TOLD


def test_an_unknown_metric_would_be_found() -> None:
    assert named("sum by (instance) (rate(txnode_no_such_total[5m])) > 3 * txnode_max_fds") == {
        "txnode_no_such_total",
        "txnode_max_fds",
    }


def test_rules_say_what_to_do() -> None:
    """Each alert has a severity, a summary, and a runbook."""
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    for rule in (rule for rule in group["rules"] if "alert" in rule):
        notes: dict[str, Any] = rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert notes["summary"]
        assert len(notes["runbook"]) > 40, rule["alert"]


def test_every_alert_is_tried() -> None:
    """Each alert fires in the tests for promtool."""
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    tried = set(re.findall(r'alertname="(\w+)"', (RULES.parent / "rules_test.yml").read_text()))
    assert alerts == tried


def test_the_dashboard_is_whole() -> None:
    """Panels have unique numbers, lie within the page, and use the chosen data source."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"


def test_every_name_is_in_its_page() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for family in FAMILIES:
        assert f"| `{family.name}` |" in page
