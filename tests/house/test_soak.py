"""The verdict and the chart of a soak, from invented samples. The soak itself takes an hour."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from scripts.bench.curve import picture, step
from scripts.bench.samples import Sample, changes, faults

MINUTES = 60
FLAT = Sample(0, 80, 30, 1, 30, 12, 1)


def hour(**growing: float) -> list[Sample]:
    """A sample every ten seconds; the given figures grow by this much in the hour, from the tenth minute on."""
    looks = [FLAT._replace(seconds=float(at)) for at in range(10, 60 * MINUTES + 1, 10)]
    late = [max(0.0, look.seconds / 60 - 10) / 50 for look in looks]
    return [
        look._replace(**{name: getattr(look, name) + by * share for name, by in growing.items()})
        for look, share in zip(looks, late, strict=True)
    ]


@pytest.mark.parametrize(
    ("growing", "reported"),
    [
        ({}, ""),
        ({"memory": 1.0}, ""),
        ({"memory": 3.0}, "memory grew by 3.4%"),
        ({"memory": -10.0}, ""),
        ({"core_memory": 30.0, "state": 5.0}, ""),
        ({"descriptors": 1.0, "threads": 1.0}, ""),
        ({"descriptors": 10.0}, "descriptors grew from 30"),
        ({"threads": 5.0}, "threads grew from 12"),
    ],
)
def test_what_grows(growing: dict[str, float], reported: str) -> None:
    """The node's memory may grow by 2 %, its descriptors and threads by two; more is reported."""
    found = faults(changes(hour(**growing), MINUTES))
    assert len(found) == bool(reported)
    assert all(reported in text for text in found)


def test_the_warm_up_does_not_count() -> None:
    """The first ten minutes do not count; in a shorter run, the same share."""
    looks = [look._replace(memory=40.0 if look.seconds < 600 else 80.0) for look in hour()]
    assert not faults(changes(looks, MINUTES))
    short = [look._replace(seconds=look.seconds / 10) for look in looks]
    assert not faults(changes(short, MINUTES / 10))


def test_the_picture() -> None:
    """It is XML, has each curve with its name, and nothing lies outside."""
    root = ElementTree.fromstring(picture("a < b", "MiB", {"node": [(0, 80), (60, 83)], "cores": [(0, 30), (60, 9)]}))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    lines = [element.attrib["points"] for element in root if element.tag.endswith("polyline")]
    points = [tuple(map(float, point.split(","))) for line in lines for point in line.split()]
    assert len(lines) == 2
    assert all(0 < x < width and 0 < y < height for x, y in points)
    assert {"node", "cores", "a < b, MiB", "60 min"} <= {element.text for element in root}


@pytest.mark.parametrize(("largest", "expected"), [(83, 20), (100, 20), (101, 50), (4.9, 1), (0.011, 0.005)])
def test_round_numbers(largest: float, expected: float) -> None:
    assert step(largest) == pytest.approx(expected)
