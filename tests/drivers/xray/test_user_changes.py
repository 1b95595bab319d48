"""How user changes are applied to a running Xray: the cheapest method by measured costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from drivers.xray.user_changes import LIVE_SECONDS, RUN_SECONDS, Batch, Swap, choose, stuck, swap_of
from protos.xray_pb2 import InboundHandlerConfig, ReceiverConfig, StreamConfig, TypedMessage

PROTOCOLS = ("vless", "vmess", "trojan", "shadowsocks", "shadowsocks_2022", "hysteria")


def work(protocol: str, users: int, added: int = 0, removed: int = 0, swap: Swap = Swap.GO_ON) -> Batch:
    return Batch(protocol, swap, users, removed, added)


def chosen(*works: Batch, everybody: int = 0, fit: bool = True) -> frozenset[str] | None:
    return choose({str(number): one for number, one in enumerate(works)}, everybody, lambda _: fit)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_few_additions(protocol: str) -> None:
    """A single new user needs no swap, with any protocol and any number of users."""
    for users in (0, 1_000, 100_000):
        assert chosen(work(protocol, users, added=1)) == frozenset()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_removal(protocol: str) -> None:
    """A removal is one call; in Shadowsocks-2022 that is unsafe, and the inbound is swapped."""
    swapped = frozenset("0") if protocol == "shadowsocks_2022" else frozenset()
    for one in (work(protocol, 10_000, removed=1), work(protocol, 10_000, added=1, removed=1)):
        assert chosen(one) == swapped


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_many_additions(protocol: str) -> None:
    """12,000 new users come by a swap, estimated to take less than three seconds."""
    one = work(protocol, 500, added=12_000)
    assert chosen(one) == frozenset("0")
    assert one.swapped < 1


def test_shadowsocks_2022_is_costly() -> None:
    """Its additions cost more with more users: 200 with ten thousand users are worth a swap."""
    assert chosen(work("vless", 10_000, added=200)) == frozenset()
    assert chosen(work("shadowsocks_2022", 10_000, added=200)) == frozenset("0")


def test_only_as_many_swaps_as_help() -> None:
    """The most costly inbound is swapped first; once the rest is cheap enough it is not swapped."""
    dear, cheap = work("shadowsocks_2022", 5_000, added=2_000), work("vless", 5_000, added=2_000)
    assert chosen(cheap, dear, cheap) == frozenset("1")
    assert chosen(*[cheap] * 5) is not None
    assert 0 < len(chosen(*[cheap] * 5) or "") < 5


def test_a_swap_is_dark() -> None:
    """If a swap would refuse connections for long, changes go by single calls as long as time allows."""
    large = work("trojan", 38_000, added=9_000)
    assert LIVE_SECONDS < large.live < RUN_SECONDS
    assert chosen(large) == frozenset()
    assert chosen(large, large, large) not in (frozenset(), None)


def test_connections_that_a_swap_ends() -> None:
    """If a swap closes connections, it is done only when single calls exceed a panel's patience."""
    ends = work("vless", 500, added=12_000, swap=Swap.END)
    assert LIVE_SECONDS < ends.live < RUN_SECONDS
    assert chosen(ends, everybody=12_500) == frozenset()
    assert chosen(ends, replace(ends, swap=Swap.GO_ON), everybody=25_000) == frozenset("1")
    assert chosen(ends, ends, ends, everybody=37_500) is not None
    assert chosen(ends, ends, ends, everybody=37_500) != frozenset()


@pytest.mark.parametrize("swap", [Swap.GO_ON, Swap.END, Swap.DEAF])
@pytest.mark.parametrize("fit", [True, False])
def test_patience(swap: Swap, fit: bool) -> None:
    """Changes that cannot be swapped and exceed a panel's patience need a new run."""
    swappable = fit and swap is not Swap.DEAF
    many = work("vless", 50_000, added=50_000, swap=swap)
    assert chosen(many, everybody=100_000, fit=fit) == (frozenset("0") if swappable else None)
    one = work("shadowsocks_2022", 50_000, removed=1, swap=swap)
    assert chosen(one, everybody=50_000, fit=fit) == (frozenset("0") if swappable else None)


def left(*works: Batch, everybody: float = 10_000, fit: bool = True) -> frozenset[str]:
    return stuck({str(number): one for number, one in enumerate(works)}, everybody, lambda _: fit)


def test_removals_that_are_unsafe() -> None:
    """Shadowsocks-2022 users are removed by a swap, or by a new run, never by calls."""
    one = work("shadowsocks_2022", 1_000, removed=1, swap=Swap.DEAF)
    assert (chosen(one), left(one)) == (None, frozenset("0"))
    one = replace(one, swap=Swap.GO_ON)
    assert (chosen(one), left(one)) == (frozenset("0"), frozenset())
    assert (chosen(one, fit=False), left(one, fit=False)) == (None, frozenset("0"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_few_removals(protocol: str) -> None:
    """With any protocol and any other changes, a few removals need no new run; but where calls are unsafe."""
    unsafe = frozenset("0") if protocol == "shadowsocks_2022" else frozenset()
    for users in (1, 1_000, 20_000):
        assert left(work(protocol, users, removed=20 if users > 20 else 1, swap=Swap.DEAF)) == unsafe


def test_many_removals() -> None:
    """A removal waits for a new run only if that is much faster."""
    swapped, some = (work("vmess", 50_000, removed=300, swap=swap) for swap in (Swap.GO_ON, Swap.DEAF))
    many, dear = replace(some, removed=40_000), work("vless", 100_000, removed=90_000, swap=Swap.DEAF)
    assert left(swapped, some, many, dear) == {"2", "3"}
    # If no new run is possible all are removed by single calls.
    assert left(swapped, some, many, dear, everybody=math.inf) == frozenset()


def test_a_new_run_is_worth_it_or_not_done() -> None:
    """If a new run would take even longer, no connection is closed for it."""
    many = work("vless", 50_000, added=30_000, swap=Swap.DEAF)
    assert chosen(many, everybody=80_000) is None
    assert chosen(many, everybody=1_000_000) == frozenset()


@pytest.mark.parametrize(
    ("transport", "swap"),
    [
        ("", Swap.GO_ON),
        ("tcp", Swap.GO_ON),
        ("websocket", Swap.GO_ON),
        ("httpupgrade", Swap.GO_ON),
        ("grpc", Swap.END),
        ("mkcp", Swap.END),
        ("splithttp", Swap.DEAF),
        ("hysteria", Swap.DEAF),
        ("one that comes later", Swap.DEAF),
    ],
)
def test_transports(transport: str, swap: Swap) -> None:
    """Inbounds with transports that may not survive a swap are never swapped."""
    receiver = ReceiverConfig(stream_settings=StreamConfig(protocol_name=transport))
    handler = InboundHandlerConfig(receiver_settings=TypedMessage(value=receiver.SerializeToString()))
    assert swap_of(handler) is swap
