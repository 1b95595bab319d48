"""Which tests the default and the nightly run take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import in_turn

CORES, WIRES, NAMES, SYNCS = ("xray", "sing-box"), ("rest", "grpc"), ("a", "b", "c", "d"), ("one", "all", "some")


@dataclass(eq=False)
class Item:
    """What the choice asks of a test."""

    name: str
    params: Mapping[str, object] = field(default_factory=dict)
    marks: Sequence[pytest.Mark] = ()
    cls: type | None = None
    path: Path = Path("test_x.py")

    @property
    def nodeid(self) -> str:
        return f"{self.path}::{self.name}[{'-'.join(map(str, self.params.values()))}]"

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params=self.params)

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)


def of(*marks: pytest.MarkDecorator, **values: Sequence[object]) -> list[Any]:
    """All combinations of these parameters."""
    combined = (dict(zip(values, each, strict=True)) for each in product(*values.values()))
    return [Item("test", params, [mark.mark for mark in marks]) for params in combined]


def chosen(items: list[Any], *, each: bool = False) -> list[Mapping[str, object]]:
    kept, left_out = in_turn.choose(items, each=each)
    assert sorted(map(id, (*kept, *left_out))) == sorted(map(id, items))
    return [item.params for item in items if item in kept]


def test_one_core_and_one_protocol_of_each_case() -> None:
    kept = chosen(of(ground=CORES, transport=WIRES, name=NAMES))
    assert sorted(str(params["name"]) for params in kept) == [*NAMES]


def test_the_same_ones_each_time() -> None:
    assert chosen(of(ground=CORES, name=NAMES)) == chosen(of(ground=CORES, name=NAMES))


def test_all_of_a_test_that_is_marked() -> None:
    assert len(chosen(of(pytest.mark.both, ground=CORES, transport=WIRES))) == 4


def test_one_value_of_a_parameter_that_takes_turns() -> None:
    assert len(chosen(of(pytest.mark.turns("name"), ground=CORES, name=NAMES, sync=SYNCS))) == 3


def test_each_value_once() -> None:
    kept = chosen(of(pytest.mark.each_once("name", "sync", "ground"), name=NAMES, sync=SYNCS, ground=CORES))
    assert [{params[name] for params in kept} for name in ("name", "sync", "ground")] == [{*NAMES}, {*SYNCS}, {*CORES}]
    assert len(kept) == 4


def test_each_core_and_each_protocol_in_the_nightly_run() -> None:
    """With what the default run takes, and each value of what takes turns."""
    marks, values = [pytest.mark.turns("sync")], {"ground": CORES, "transport": WIRES, "name": NAMES, "sync": SYNCS}
    items = of(*marks, **values)
    kept = chosen(items, each=True)
    assert {(params["name"], params[axis]) for params in kept for axis in ("ground", "transport", "sync")} == {
        (name, value) for name in NAMES for value in (*CORES, *WIRES, *SYNCS)
    }
    assert len(kept) == len(NAMES) * len(SYNCS)
    assert all(params in kept for params in chosen(items))


def test_classes_that_try_the_same_on_other_cores() -> None:
    class OnOne:
        in_turn = True

    class OnAnother(OnOne):
        pass

    class Alone:
        pass

    items: list[Any] = [Item(f"test_{name}", cls=cls) for cls in (OnOne, OnAnother, Alone) for name in NAMES]
    for item in items:
        item.path = Path(f"test_{item.cls is Alone}.py")
    kept, _ = in_turn.choose(items)
    assert sorted((item.name, item.path.name) for item in kept) == sorted(
        (f"test_{name}", f"test_{alone}.py") for name in NAMES for alone in (False, True)
    )
    kept, _ = in_turn.choose(items, each=True)
    assert kept == items
