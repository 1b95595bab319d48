"""How changes of users get into a running Xray: what is cheapest for everybody, by what it was measured to cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivers.xray.ways import LIVE_SECONDS, RUN_SECONDS, Swap, Work, choose, swap_of
from protos.xray_pb2 import InboundHandlerConfig, ReceiverConfig, StreamConfig, TypedMessage

PROTOCOLS = ("vless", "vmess", "trojan", "shadowsocks", "shadowsocks_2022", "hysteria")


def work(protocol: str, users: int, added: int = 0, removed: int = 0, swap: Swap = Swap.GO_ON) -> Work:
    return Work(protocol, swap, users, removed, added)


def chosen(*works: Work, everybody: int = 0, fit: bool = True) -> frozenset[str] | None:
    return choose({str(number): one for number, one in enumerate(works)}, everybody, lambda _: fit)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_few_come_live(protocol: str) -> None:
    """A single user who comes is let in without a swap, whatever the protocol and however many are there."""
    for users in (0, 1_000, 100_000):
        assert chosen(work(protocol, users, added=1)) == frozenset()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_few_leave(protocol: str) -> None:
    """Who leaves costs a call; only in Shadowsocks-2022 that is not safe, and the inbound is swapped."""
    swapped = frozenset("0") if protocol == "shadowsocks_2022" else frozenset()
    for one in (work(protocol, 10_000, removed=1), work(protocol, 10_000, added=1, removed=1)):
        assert chosen(one) == swapped


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_many_come_with_their_inbound(protocol: str) -> None:
    """12,000 more users are brought in by a swap, in less than three seconds as it is reckoned."""
    one = work(protocol, 500, added=12_000)
    assert chosen(one) == frozenset("0")
    assert one.swapped < 1


def test_shadowsocks_2022_is_dear() -> None:
    """There additions take the longer the more users there are: the hundredth of ten thousand is worth a swap."""
    assert chosen(work("vless", 10_000, added=200)) == frozenset()
    assert chosen(work("shadowsocks_2022", 10_000, added=200)) == frozenset("0")


def test_only_as_many_swaps_as_help() -> None:
    """The dearest inbound is swapped first, and when the others are cheap enough they stay as they are."""
    dear, cheap = work("shadowsocks_2022", 5_000, added=2_000), work("vless", 5_000, added=2_000)
    assert chosen(cheap, dear, cheap) == frozenset("1")
    assert chosen(*[cheap] * 5) is not None
    assert 0 < len(chosen(*[cheap] * 5) or "") < 5


def test_a_swap_is_dark() -> None:
    """Where swapping a large inbound would refuse new connections for long, changes come live while patience lasts."""
    large = work("trojan", 38_000, added=9_000)
    assert LIVE_SECONDS < large.live < RUN_SECONDS
    assert chosen(large) == frozenset()
    assert chosen(large, large, large) not in (frozenset(), None)


def test_connections_that_a_swap_ends() -> None:
    """Where a swap ends connections changes come live for as long as a panel waits, and are swapped only then."""
    ends = work("vless", 500, added=12_000, swap=Swap.END)
    assert LIVE_SECONDS < ends.live < RUN_SECONDS
    assert chosen(ends, everybody=12_500) == frozenset()
    assert chosen(ends, replace(ends, swap=Swap.GO_ON), everybody=25_000) == frozenset("1")
    assert chosen(ends, ends, ends, everybody=37_500) is not None
    assert chosen(ends, ends, ends, everybody=37_500) != frozenset()


@pytest.mark.parametrize("swap", [Swap.GO_ON, Swap.END, Swap.DEAF])
@pytest.mark.parametrize("fit", [True, False])
def test_patience(swap: Swap, fit: bool) -> None:
    """No panel's patience is exceeded: what cannot be swapped and is too dear takes a new run of the core."""
    swappable = fit and swap is not Swap.DEAF
    many = work("vless", 50_000, added=50_000, swap=swap)
    assert chosen(many, everybody=100_000, fit=fit) == (frozenset("0") if swappable else None)
    one = work("shadowsocks_2022", 50_000, removed=1, swap=swap)
    assert chosen(one, everybody=50_000, fit=fit) == (frozenset("0") if swappable else None)


def test_where_nobody_comes() -> None:
    """A user of Shadowsocks-2022 is removed live from a run that gets no new connections: nobody shakes hands there."""
    one = work("shadowsocks_2022", 1_000, removed=1, swap=Swap.DEAF)
    assert chosen(one) is None
    assert chosen(replace(one, quiet=True)) == frozenset()


def test_a_new_run_is_worth_it_or_not_done() -> None:
    """Where a new run would take longer still, nobody's connection is ended for it."""
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
    """A transport that is not known to survive it is never swapped."""
    receiver = ReceiverConfig(stream_settings=StreamConfig(protocol_name=transport))
    handler = InboundHandlerConfig(receiver_settings=TypedMessage(value=receiver.SerializeToString()))
    assert swap_of(handler) is swap
