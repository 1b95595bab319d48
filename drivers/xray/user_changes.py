"""Choose how to apply changed users to a running core: single calls, a swap of their inbound, or a new run. Pure.

Single calls do not affect other users, but there is one per user, and with some protocols its cost grows with the
number of users. A swap removes the inbound and adds it with all users in one call: connections continue where the
transport allows, and new ones are refused for some milliseconds. A new run takes seconds; only additions may wait for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from drivers.xray.messages import stream_of
from drivers.xray.wireguard import is_wireguard
from protos.xray_pb2 import InboundHandlerConfig

# Estimated seconds of single calls above which inbounds are swapped, and of both above which a new run is considered.
# Deployed panels wait 8 s, and a busy machine may need twice the estimate.
LIVE_SECONDS = 2.0
RUN_SECONDS = 6.5

# Rough costs in seconds, on busy machines; `scripts/bench/ways.py` measures them. A call, with the best number in
# flight, …
CALL = 250e-6
# … and in addition, for each user that the inbound has.
ADDITION = {"shadowsocks": 3e-9, "shadowsocks_2022": 2e-6, "hysteria": 5e-9}
REMOVAL = {"vmess": 10e-9, "shadowsocks": 14e-9, "shadowsocks_2022": 2e-6, "hysteria": 40e-9}
# A swap: a fixed cost, and one for each user that the inbound has then. …
SWAP = 0.02
SWAP_USER = {"vmess": 25e-6, "trojan": 28e-6, "shadowsocks": 14e-6}
SWAP_ANY_USER = 10e-6
# … New connections are refused for as long; while time allows, each second of that counts as this many.
DARK = 4
# A new run: the same, with the users of all inbounds.
RUN, RUN_USER = 1.5, 20e-6


# The protocol whose users must not be removed by calls from an inbound that gets connections.
UNSAFE_REMOVALS = "shadowsocks_2022"


class Swap(Enum):
    """The effect of a swap on the connections of an inbound; tried on the core for each transport."""

    GO_ON = 1
    END = 2
    # The port may stay deaf: no swap.
    DEAF = 3


# Transports by their names in a converted configuration; others are not swapped: XHTTP over HTTP/3 leaves its socket
# open, and Hysteria's clients notice only after half a minute.
_TRANSPORTS = {
    "": Swap.GO_ON,
    "tcp": Swap.GO_ON,
    "websocket": Swap.GO_ON,
    "httpupgrade": Swap.GO_ON,
    "grpc": Swap.END,
    "mkcp": Swap.END,
}


@dataclass(frozen=True)
class Batch:
    """The changes of a batch in one inbound that has `users`. A changed account counts as removed and added."""

    protocol: str
    swap: Swap
    users: int
    removed: int = 0
    added: int = 0

    @property
    def needs_swap(self) -> bool:
        """Whether these changes must not be made by calls."""
        return self.protocol == UNSAFE_REMOVALS and self.removed > 0

    @property
    def live(self) -> float:
        """Estimated seconds in single calls. 0 for WireGuard: they disturb no tunnel, and a new run needs as long."""
        if self.protocol == "wireguard":
            return 0.0
        left = self.users - self.removed
        removal = CALL + REMOVAL.get(self.protocol, 0.0) * (self.users + left) / 2
        addition = CALL + ADDITION.get(self.protocol, 0.0) * (left + self.added / 2)
        return self.removed * removal + self.added * addition

    @property
    def swapped(self) -> float:
        each = SWAP_USER.get(self.protocol, SWAP_ANY_USER)
        return SWAP + each * (self.users - self.removed + self.added)


def swap_of(handler: InboundHandlerConfig) -> Swap:
    """The effect of a swap of this inbound. Never done to WireGuard, whose peers would need half a minute to return."""
    if is_wireguard(handler):
        return Swap.DEAF
    return _TRANSPORTS.get(stream_of(handler).protocol_name, Swap.DEAF)


def choose(batches: Mapping[str, Batch], new_run_users: float, fits: Callable[[str], bool]) -> frozenset[str] | None:
    """The inbounds to swap, while all others change by single calls; None for a new run.

    `new_run_users`: the number of accounts in a new run. `fits`: whether an inbound can be added in one call.
    """
    # A swap does not disturb handshakes: those under way go on with the users from before it.
    swapped = {tag for tag, batch in batches.items() if batch.needs_swap and _swaps(tag, batch, fits)}
    if any(batch.needs_swap and tag not in swapped for tag, batch in batches.items()):
        return None
    if not swapped and _seconds(batches, swapped) <= LIVE_SECONDS:
        return frozenset()
    for swap, enough, dark in (
        (Swap.GO_ON, LIVE_SECONDS, DARK),
        (Swap.GO_ON, RUN_SECONDS, 1),
        (Swap.END, RUN_SECONDS, 1),
    ):
        worth_it = {tag for tag, batch in batches.items() if batch.swap is swap and dark * batch.swapped < batch.live}
        swapped |= _dearest(batches, swapped, worth_it, enough, fits)
    spent = _seconds(batches, swapped)
    return None if spent > RUN_SECONDS and spent > _new_run(new_run_users) else frozenset(swapped)


def stuck(batches: Mapping[str, Batch], new_run_users: float, fits: Callable[[str], bool]) -> frozenset[str]:
    """The inbounds whose removals need a new run, or are much faster with one."""
    patience = max(_new_run(new_run_users), RUN_SECONDS)
    leaving = {tag: batch for tag, batch in batches.items() if batch.removed and not _swaps(tag, batch, fits)}
    return frozenset(tag for tag, batch in leaving.items() if batch.live > patience or batch.needs_swap)


def _swaps(tag: str, batch: Batch, fits: Callable[[str], bool]) -> bool:
    return batch.swap is not Swap.DEAF and fits(tag)


def _new_run(new_run_users: float) -> float:
    return RUN + RUN_USER * new_run_users


def _dearest(
    batches: Mapping[str, Batch], swapped: set[str], worth_it: set[str], enough: float, fits: Callable[[str], bool]
) -> set[str]:
    """Which inbounds of `worth_it` to swap in addition: the most costly first, until the rest is cheap enough."""
    chosen: set[str] = set()
    for tag in sorted(worth_it - swapped, key=lambda tag: batches[tag].swapped - batches[tag].live):
        if _seconds(batches, swapped | chosen) <= enough:
            break
        if fits(tag):
            chosen.add(tag)
    return chosen


def _seconds(batches: Mapping[str, Batch], swapped: set[str]) -> float:
    return sum(batch.swapped if tag in swapped else batch.live for tag, batch in batches.items())
