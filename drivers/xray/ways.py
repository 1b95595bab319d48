"""How changed users get into a running core: one by one, with the whole of their inbound, or with a new run. Pure.

One by one nobody else notices, but each user is a call, and with some protocols a call takes the longer the more users
there are. A swap puts the inbound back with everybody in one call: connections go on where the transport lets them, and
new ones are refused for some milliseconds. A new run ends all connections of all inbounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from protos.xray_pb2 import InboundHandlerConfig, ReceiverConfig

# Seconds of live changes above which inbounds are swapped, and of both above which a new run is considered: deployed
# panels wait for 8, and a busy machine may need twice as long as is reckoned here.
LIVE_SECONDS = 2.0
RUN_SECONDS = 6.5

# What `scripts/bench/ways.py` measured, in seconds. A call, with as many in flight as help: …
CALL = 250e-6
# … and on top of it, for each user that the inbound has.
ADDITION = {"shadowsocks": 3e-9, "shadowsocks_2022": 2e-6, "hysteria": 5e-9}
REMOVAL = {"vmess": 10e-9, "shadowsocks": 14e-9, "shadowsocks_2022": 2e-6, "hysteria": 40e-9}
# A swap, and a new run: something anyhow, and something for each user.
SWAP, SWAP_USER = 0.02, 15e-6
RUN, RUN_USER = 1.5, 20e-6


class Swap(Enum):
    """What becomes of an inbound's connections when it is swapped. Tried on the core, transport by transport."""

    GO_ON = 1
    END = 2
    # The port may stay deaf: never to be done.
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
    """What a batch asks of one inbound that has `users`. Who gets another account is removed and added."""

    protocol: str
    swap: Swap
    users: int
    removed: int = 0
    added: int = 0

    @property
    def unsafe(self) -> bool:
        """Shadowsocks-2022 can panic, or bill the wrong user, when one is removed while another shakes hands."""
        return self.protocol == "shadowsocks_2022" and self.removed > 0

    @property
    def live(self) -> float:
        """Seconds for these changes one by one."""
        left = self.users - self.removed
        removal = CALL + REMOVAL.get(self.protocol, 0.0) * (self.users + left) / 2
        addition = CALL + ADDITION.get(self.protocol, 0.0) * (left + self.added / 2)
        return self.removed * removal + self.added * addition

    @property
    def swapped(self) -> float:
        """Seconds for a swap."""
        return SWAP + SWAP_USER * (self.users - self.removed + self.added)


def swap_of(handler: InboundHandlerConfig) -> Swap:
    """What a swap of this inbound would do."""
    transport = ReceiverConfig.FromString(handler.receiver_settings.value).stream_settings.protocol_name
    return _TRANSPORTS.get(transport, Swap.DEAF)


def choose(works: Mapping[str, Work], everybody: int, fits: Callable[[str], bool]) -> frozenset[str] | None:
    """The inbounds to be swapped, while all others change one by one; None if it takes a new run.

    `everybody` is how many accounts a new run would have. `fits` tells whether an inbound can be put back in one call.
    """
    swapped = {tag for tag, work in works.items() if work.unsafe}
    if any(works[tag].swap is Swap.DEAF or not fits(tag) for tag in swapped):
        return None
    for swap, enough in ((Swap.GO_ON, LIVE_SECONDS), (Swap.END, RUN_SECONDS)):
        swapped |= _worth_it(works, swapped, swap, enough, fits)
    spent = _seconds(works, swapped)
    return None if spent > RUN_SECONDS and spent > RUN + RUN_USER * everybody else frozenset(swapped)


def _worth_it(
    works: Mapping[str, Work], swapped: set[str], swap: Swap, enough: float, fits: Callable[[str], bool]
) -> set[str]:
    """The inbounds of this kind that are to be swapped, too, the dearest first, until what is left is cheap enough."""
    chosen: set[str] = set()
    for tag in sorted(works.keys() - swapped, key=lambda tag: works[tag].swapped - works[tag].live):
        if _seconds(works, swapped | chosen) <= enough:
            break
        work = works[tag]
        if work.swap is swap and work.swapped < work.live and fits(tag):
            chosen.add(tag)
    return chosen


def _seconds(works: Mapping[str, Work], swapped: set[str]) -> float:
    return sum(work.swapped if tag in swapped else work.live for tag, work in works.items())
