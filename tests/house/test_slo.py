"""The published objectives: the verdict on measured values, and that docs/slo.md has them all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from node.api.methods import METHODS, Kind
from scripts.bench.objectives import CALLS, LISTS, OBJECTIVES, faults, line, markdown, missed, promised
from scripts.bench.results import Row, from_json, number, to_json
from scripts.bench.slo import reported

NAME, (MOST, UNIT) = next(iter(OBJECTIVES.items()))
MET = [Row(name, unit, most, samples=100) for name, (most, unit) in OBJECTIVES.items()]
# Streams have no end, an update is a job, and a Stop alone ends the core at the caller's wish.
UNTIMED = {"Stop", "UpdateCore", "UpdateGeoFiles", "UpdateNode"}


def verdict(rows: list[Row]) -> int:
    return reported(faults(rows, OBJECTIVES))


def test_values_as_promised_pass() -> None:
    """A value equal to its objective meets it; the exit status is 0."""
    assert not any(map(missed, MET))
    assert verdict(MET) == 0


@pytest.mark.parametrize("more", [0.01, math.inf, math.nan])
def test_one_missed_objective_fails(more: float) -> None:
    """A value above one objective, or none at all, makes the exit status 1, and only that one is named."""
    for name in OBJECTIVES:
        found = faults([row if row.name != name else replace(row, ours=row.ours + more) for row in MET], OBJECTIVES)
        assert [f"missed: {name} " in fault for fault in found] == [True]
        assert reported(found) == 1


def test_what_was_not_measured_fails() -> None:
    """An objective without a row is missed, unless only some parts were asked for."""
    assert faults(MET[1:], OBJECTIVES) == [f"not measured: {NAME}"]
    assert verdict(MET[1:]) == 1
    assert not faults(MET[1:], [])


def test_missed_objectives_are_marked() -> None:
    """By a star on the screen, in bold in Markdown."""
    bad = Row(NAME, UNIT, MOST + 1, samples=7)
    assert line(bad).endswith(" *")
    assert not line(MET[0]).endswith(" *")
    assert markdown([bad])[-1] == f"| {NAME} | {promised(NAME)} | **{number(MOST + 1)}** | 7 |"


def test_a_saved_run_has_the_samples() -> None:
    assert from_json(to_json(MET, "two processors")) == MET


def test_every_call_has_an_objective() -> None:
    """Each operation with one reply has one, over both protocols."""
    timed = {word.strip(",") for what in (*CALLS, *LISTS) for word in what.split()}
    assert {method.name for method in METHODS if method.kind in (Kind.UNARY, Kind.FEED)} - UNTIMED <= timed


def test_the_page_has_every_objective() -> None:
    """docs/slo.md has the objectives of the code, and no others."""
    page = (Path(__file__).parents[2] / "docs" / "slo.md").read_text()
    for name in OBJECTIVES:
        assert f"| {name} | {promised(name)} | " in page
    assert page.count(", p99 | ") == sum(", p99" in name for name in OBJECTIVES)
