"""Cases of abuse: a user, a kind, how often and when. At most one report of each in a minute. Pure."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from node.contract.abuse import Action, Kind, Request
from node.contract.connections import Address
from protos.service_pb2 import AbuseCount

# Seconds between two reports of a case, and without a request after which it is over.
MINUTE, OVER = 60.0, 600.0
# Targets and addresses in a report, and the most characters of a target.
EXAMPLES, LONGEST = 5, 80
# Cases kept at most.
MOST = 20_000


@dataclass(slots=True)
class Case:
    """Times are Unix seconds; `reported`: of the last report."""

    key: str
    kind: Kind
    action: Action
    first: float
    last: float = 0.0
    times: int = 0
    reported: float = -math.inf
    asked: list[str] = field(default_factory=list)
    sources: list[Address] = field(default_factory=list)

    def add(self, action: Action, request: Request, now: float) -> None:
        self.action, self.last = action, now
        self.times += 1
        if len(self.asked) < EXAMPLES:
            target = f"{'udp' if request.udp else 'tcp'} {request.target[:LONGEST]}"
            if target not in self.asked:
                self.asked.append(target)
        if request.address not in self.sources and len(self.sources) < EXAMPLES:
            self.sources.append(request.address)

    @property
    def addresses(self) -> str:
        return ", ".join(str(ipaddress.ip_address(source)) for source in self.sources)

    @property
    def targets(self) -> str:
        return ", ".join(self.asked)

    @property
    def fields(self) -> dict[str, object]:
        """The fields of the event, without the user."""
        times = {"times": self.times, "first": _moment(self.first), "last": _moment(self.last)}
        return {"address": self.addresses, **times, "targets": self.targets, "action": self.action.value}


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Cases:
    """All cases that are not over, and the counts since the node started."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._cases: dict[tuple[str, Kind], Case] = {}
        # Those with requests that were not reported yet.
        self._news: dict[tuple[str, Kind], Case] = {}
        self.counts: dict[Kind, AbuseCount] = {}

    def add(self, kind: Kind, action: Action, request: Request) -> None:
        """Count a request."""
        now, place = self._now(), (request.key, kind)
        counted = self.counts.setdefault(kind, AbuseCount())
        counted.requests += 1
        case = self._cases.get(place)
        if case is None or now > case.last + OVER:
            if len(self._cases) >= MOST:
                del self._cases[next(iter(self._cases))]
            case = self._cases[place] = Case(request.key, kind, action, now)
            counted.cases += 1
        case.add(action, request, now)
        self._news[place] = case

    def due(self) -> Iterator[Case]:
        """The cases to report now."""
        now = self._now()
        for place, case in [*self._news.items()]:
            if not case.reported <= now < case.reported + MINUTE:
                del self._news[place]
                case.reported = now
                yield case

    def tidy(self) -> None:
        """Forget those that are over."""
        now = self._now()
        self._cases = {place: case for place, case in self._cases.items() if now <= case.last + OVER}
