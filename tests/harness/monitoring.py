"""The monitoring files of deploy/, and the metrics that they use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = _DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = _DEPLOY / "grafana" / "txnode.json"

# Not the names of recording rules, which have a colon before it.
_NAME = re.compile(r"(?<![\w:])txnode_\w+")


def expressions(file: Path) -> Iterator[str]:
    """Every expression of the rules or of the dashboard."""
    if file.suffix == ".yml":
        yield from (rule["expr"] for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"])
        return
    dashboard: dict[str, Any] = json.loads(file.read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    yield from (variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable)


def named(expression: str) -> set[str]:
    """The node's metrics in an expression."""
    return set(_NAME.findall(expression))
