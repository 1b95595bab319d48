"""Rows of the ledger as the interface delivers them, and readings that come in parts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from drivers.process import channel
from drivers.xray import api
from node.contract.counters import DELIVERED, DIRECTIONS, Row, Scope, Seen, counter_name
from node.traffic.ledger import Ledger
from node.traffic.reply import packed
from node.traffic.sums import Sums
from protos import xray_pb2
from protos.columns_pb2 import Stats
from protos.service_pb2 import StatResponse
from scripts.staging import background
from tests.harness.ledgers import pending as pending_rows
from tests.harness.rpc_server import serving

names, values = st.text(max_size=20) | st.text(min_size=100, max_size=200), st.integers(0, 2**63 - 1)
rows_of_users = st.lists(st.builds(Row, st.just(Scope.USER), names, values, values), max_size=20)
readings = st.dictionaries(
    st.builds(counter_name, st.sampled_from(DELIVERED), st.sampled_from("abc"), st.sampled_from(DIRECTIONS)), values
)


def moved(booked: Mapping[Scope, Sums]) -> bool:
    return any(sums.moved for sums in booked.values())


@given(rows_of_users, st.booleans())
def test_rows_are_serialised(rows: list[Row], zeros: bool) -> None:
    """Both directions of each row, in order; rows without bytes only if requested."""
    columns = [row.name for row in rows], [row.uplink for row in rows], [row.downlink for row in rows]
    reply = Stats(stat=packed(*columns, zeros))
    told = [
        (stat.name, stat.type, stat.link, stat.value)
        for stat in StatResponse.FromString(reply.SerializeToString()).stats
    ]
    wanted = [
        (row.name, way, "traffic", value) for row in rows for way, value in zip(DIRECTIONS, row.both, strict=True)
    ]
    assert told == [row for row in wanted if zeros or row[-1]]


@given(st.lists(st.tuples(readings, st.integers(1, 5)), max_size=5))
def test_a_reading_in_parts_is_a_reading(steps: list[tuple[dict[str, int], int]]) -> None:
    """Booked in parts, it gives the same as booked whole."""
    whole, parts = Ledger(), Ledger()
    for reading, size in steps:
        counters = list(reading.items())
        booked = [parts.book_part("run", counters[at : at + size]) for at in range(0, len(counters), size)]
        assert moved(whole.book("run", reading)) == any(map(moved, booked))
        assert [pending_rows(whole, scope) for scope in DELIVERED] == [
            pending_rows(parts, scope) for scope in DELIVERED
        ]
    assert set(whole.changes()) == set(parts.changes())


@pytest.mark.parametrize("count", [0, 1, channel.SLICE, channel.SLICE + 1, 3 * channel.SLICE])
def test_a_large_reply_is_whole(count: int, tmp_path: Path) -> None:
    """Every counter of the core's reply is read, in however many parts."""
    counters = {f"user>>>{number}>>>traffic>>>uplink": number for number in range(count)}
    reply = xray_pb2.QueryStatsResponse()
    for name, value in counters.items():
        reply.stat.add(name=name, value=value)

    async def answer(_: bytes, __: object) -> bytes:
        return reply.SerializeToString()

    handlers = {"QueryStats": grpc.unary_unary_rpc_method_handler(answer)}
    with serving(f"unix:{tmp_path}/api.sock", api.STATS, handlers):
        assert background.run(lambda: _asked(tmp_path / "api.sock")) == counters


class Answering:
    """A core's API that has these counters, in any order."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}

    async def call(self, _: str, __: Message, reply: type[Message], ___: float) -> Message:
        rows = [xray_pb2.Stat(name=name, value=value) for name, value in self.counters.items()]
        return reply.FromString(xray_pb2.QueryStatsResponse(stat=random.sample(rows, len(rows))).SerializeToString())


@given(st.lists(readings, max_size=5), st.integers(1, 5))
def test_unchanged_counters_are_skipped(steps: list[dict[str, int]], size: int) -> None:
    """A ledger that gets only what has changed since the last reading books the same."""
    core, whole, changed, seen = Answering(), Ledger(), Ledger(), Seen()
    clock: Any = Clock()
    asking = channel.StatsApi(clock, cast(Any, core), "")
    for step in steps:
        before = dict(core.counters)
        core.counters |= step
        with patch.object(channel, "SLICE", size):
            reading = ensureDeferred(asking.counters(seen=seen))
            while not reading.called:
                clock.advance(0)
        found = cast(dict[str, int], reading.result)
        assert found.items() >= core.counters.items() - before.items()
        assert not before or step or not found
        changed.book("run", found)
        whole.book("run", core.counters)
        assert all({*pending_rows(whole, scope)} == {*pending_rows(changed, scope)} for scope in DELIVERED)


def test_an_unreadable_row() -> None:
    """It is an error of the core, as for all its replies."""

    class Broken(Answering):
        async def call(self, _: str, __: Message, reply: type[Message], ___: float) -> Message:
            return reply.FromString(Stats(stat=[b"\n\x01\xff\x10\x05"]).SerializeToString())

    clock: Any = Clock()
    reading = ensureDeferred(channel.StatsApi(clock, cast(Any, Broken()), "").counters())
    assert isinstance(cast(Failure, reading.result).value, channel.ApiFailed)
    reading.addErrback(lambda _: None)


async def _asked(socket: Path) -> dict[str, int]:
    """The counters that the node reads from a core's reply."""
    asking = api.Api(background.reactor, str(socket))
    try:
        return await asking.counters()
    finally:
        await asking.close()
