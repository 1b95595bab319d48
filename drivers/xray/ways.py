"""How changed users get into a running core: one by one, with the whole of their inbound, or with a new run. Pure.

One by one nobody else notices, but each user is a call, and with some protocols a call takes the longer the more users
there are. A swap puts the inbound back with everybody in one call: connections go on where the transport lets them, and
new ones are refused for some milliseconds. A new run ends all connections of all inbounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from drivers.xray.wireguard import is_wireguard
from protos.xray_pb2 import InboundHandlerConfig, ReceiverConfig

# Seconds of live changes above which inbounds are swapped, and of both above which a new run is considered: deployed
# panels wait for 8, and a busy machine may need twice as long as is reckoned here.
LIVE_SECONDS = 2.0
RUN_SECONDS = 6.5

# Rough figures in seconds, of machines that were busy; `scripts/bench/ways.py` measures them. A call, with as many in
# flight as help: …
CALL = 250e-6
# … and on top of it, for each user that the inbound has.
ADDITION = {"shadowsocks": 3e-9, "shadowsocks_2022": 2e-6, "hysteria": 5e-9}
REMOVAL = {"vmess": 10e-9, "shadowsocks": 14e-9, "shadowsocks_2022": 2e-6, "hysteria": 40e-9}
# A swap: something anyhow, and something for each user that the inbound has then. …
SWAP = 0.02
SWAP_USER = {"vmess": 25e-6, "trojan": 28e-6, "shadowsocks": 14e-6}
SWAP_ANY_USER = 10e-6
# … New connections are refused for about as long; where patience allows it that counts as so many seconds each.
DARK = 4
# A new run, likewise, with the users of all inbounds.
RUN, RUN_USER = 1.5, 20e-6


class Swap(Enum):
    """What becomes of an inbound's connections when it is swapped. Tried on the core, transport by transport."""

    GO_ON = 1
    END = 2
    # The port may stay deaf, as it does where other runs share it: not to be done.
    DEAF = 3


# Transports by their names in a converted configuration; what is not here is not known, and not swapped. XHTTP over
# HTTP/3 leaves its socket open, and Hysteria its clients in the dark for half a minute.
_TRANSPORTS = {
    "": Swap.GO_ON,
    "tcp": Swap.GO_ON,
    "websocket": Swap.GO_ON,
    "httpupgrade": Swap.GO_ON,
    "grpc": Swap.END,
    "mkcp": Swap.END,
}


@dataclass(frozen=True)
class Work:
    """What a batch asks of one inbound that has `users`. Who gets another account is removed and added.

    `quiet`: no new connections come to it.
    """

    protocol: str
    swap: Swap
    users: int
    removed: int = 0
    added: int = 0
    quiet: bool = False

    @property
    def unsafe(self) -> bool:
        """Whether it takes another way: new handshakes could begin at any time."""
        return self.endangered and not self.quiet

    @property
    def endangered(self) -> bool:
        """Shadowsocks-2022 can panic, or bill the wrong user, when one is removed while another shakes hands."""
        return self.protocol == "shadowsocks_2022" and self.removed > 0

    @property
    def live(self) -> float:
        """Seconds for these changes one by one. Peers of WireGuard take a new run as long, and end nothing here."""
        if self.protocol == "wireguard":
            return 0.0
        left = self.users - self.removed
        removal = CALL + REMOVAL.get(self.protocol, 0.0) * (self.users + left) / 2
        addition = CALL + ADDITION.get(self.protocol, 0.0) * (left + self.added / 2)
        return self.removed * removal + self.added * addition

    @property
    def swapped(self) -> float:
        """Seconds for a swap."""
        each = SWAP_USER.get(self.protocol, SWAP_ANY_USER)
        return SWAP + each * (self.users - self.removed + self.added)


def swap_of(handler: InboundHandlerConfig) -> Swap:
    """What a swap of this inbound would do. The peers of WireGuard would need half a minute to come back."""
    if is_wireguard(handler):
        return Swap.DEAF
    transport = ReceiverConfig.FromString(handler.receiver_settings.value).stream_settings.protocol_name
    return _TRANSPORTS.get(transport, Swap.DEAF)


def choose(works: Mapping[str, Work], everybody: int, fits: Callable[[str], bool]) -> frozenset[str] | None:
    """The inbounds to be swapped, while all others change one by one; None if it takes a new run.

    `everybody` is how many accounts a new run would have. `fits` tells whether an inbound can be put back in one call.
    """
    swapped = {tag for tag, work in works.items() if work.unsafe}
    if not swapped and _seconds(works, swapped) <= LIVE_SECONDS:
        return frozenset()
    if any(works[tag].swap is Swap.DEAF or not fits(tag) for tag in swapped):
        return None
    for swap, enough, dark in (
        (Swap.GO_ON, LIVE_SECONDS, DARK),
        (Swap.GO_ON, RUN_SECONDS, 1),
        (Swap.END, RUN_SECONDS, 1),
    ):
        worth_it = {tag for tag, work in works.items() if work.swap is swap and dark * work.swapped < work.live}
        swapped |= _dearest(works, swapped, worth_it, enough, fits)
    spent = _seconds(works, swapped)
    return None if spent > RUN_SECONDS and spent > RUN + RUN_USER * everybody else frozenset(swapped)


def _dearest(
    works: Mapping[str, Work], swapped: set[str], worth_it: set[str], enough: float, fits: Callable[[str], bool]
) -> set[str]:
    """Of these inbounds those to be swapped, too: the dearest first, until what is left is cheap enough."""
    chosen: set[str] = set()
    for tag in sorted(worth_it - swapped, key=lambda tag: works[tag].swapped - works[tag].live):
        if _seconds(works, swapped | chosen) <= enough:
            break
        if fits(tag):
            chosen.add(tag)
    return chosen


def _seconds(works: Mapping[str, Work], swapped: set[str]) -> float:
    return sum(work.swapped if tag in swapped else work.live for tag, work in works.items())
