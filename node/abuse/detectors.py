"""Recognise abuse in the requests of one user: torrents, scans, mail. Pure, and of fixed size.

What counts is how many different targets a user asks for, in two halves of a window that moves on by a half. Sets of
targets are bitmaps: a collision makes a count smaller, never larger.
"""

from __future__ import annotations

from collections.abc import Collection

from node.contract.abuse import MAIL_PORT, TORRENT_PORTS, Kind, Request

# Scans: seconds of a half, and the weight of all targets in a window at which they are one.
SCAN_HALF, SCAN = 5.0, 50.0
# The weights of a target: on ports that worms and burglars try, on those of web sites and the like, on any other.
RISKY, COMMON, OTHER = 5.0, 0.1, 1.0
# The part of its weight that a target has that answered.
ANSWERED = 0.2
RISKY_PORTS = frozenset({21, 22, 23, 135, 139, 445, 1433, 2222, 2323, 3306, 3389, 5432, 5555, 5900, 5985, 6379, 7547})
COMMON_PORTS = frozenset({53, 80, 123, 443, 853, 2053, 2083, 2087, 2096, 5222, 5223, 5228, 8080, 8443})
# Torrents by behaviour: seconds of a half, and how many hosts, on how many different ports each, a user asks for; all
# ports are above HIGH. The servers of a game have the same few ports.
SWARM_HALF, HOSTS, PORTS = 30.0, 40, 0.6
HIGH = 1024
# Different targets on ports of trackers and of BitTorrent's clients in a window that are a torrent.
TRACKERS = 3
# Seconds after which nothing of a quiet user counts any more.
QUIET = 2 * SWARM_HALF
_BITS = 4096


class Targets:
    """How many different things were added, in this half of a window and the one before."""

    __slots__ = ("_before", "_count", "_count_before", "_here")

    def __init__(self) -> None:
        self._here, self._before = bytearray(_BITS // 8), bytearray(_BITS // 8)
        self._count = self._count_before = 0

    def __len__(self) -> int:
        return self._count + self._count_before

    def add(self, number: int) -> bool:
        """Add the thing with this hash. Returns whether it is new in the window."""
        place, bit = (number >> 3) % (_BITS // 8), 1 << (number & 7)
        if (self._here[place] | self._before[place]) & bit:
            return False
        self._here[place] |= bit
        self._count += 1
        return True

    def move(self, halves: int) -> None:
        """The window has moved by so many halves."""
        self._before = self._here if halves == 1 else bytearray(_BITS // 8)
        self._count_before = self._count if halves == 1 else 0
        self._here, self._count = bytearray(_BITS // 8), 0


class _Scan:
    """The targets of one user in the last seconds."""

    __slots__ = ("_hosts", "_ports", "pairs", "turn", "weight", "weight_before")

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.pairs = Targets()
        # Without those on common ports, which are all that most users have.
        self._hosts: Targets | None = None
        self._ports: Targets | None = None
        self.weight = self.weight_before = 0.0

    def move(self, turn: int) -> None:
        halves, self.turn = turn - self.turn, turn
        for some in (self.pairs, self._hosts, self._ports):
            if some is not None:
                some.move(halves)
        self.weight_before, self.weight = self.weight if halves == 1 else 0.0, 0.0

    def add(self, host: int, port: int, udp: bool, answered: bool) -> bool:
        """Add a target that is new in the window. Returns whether all of them are a scan."""
        self.weight += self._weight(host, port, udp) * (ANSWERED if answered else 1.0)
        return self.weight + self.weight_before >= SCAN

    def _weight(self, host: int, port: int, udp: bool) -> float:
        if port in COMMON_PORTS:
            return COMMON
        hosts, ports = self._hosts, self._ports
        if hosts is None or ports is None:
            hosts, ports = self._hosts, self._ports = Targets(), Targets()
        same_host, same_port = not hosts.add(host), not ports.add(port)
        if udp:
            # Many hosts are the peers of a game; many ports of one host are not.
            return OTHER * same_host
        if port in RISKY_PORTS:
            return RISKY
        # A high port of a host, and neither seen before, is what a torrent asks for.
        return OTHER * (same_host or same_port or port < HIGH)


class _Swarm:
    """The targets of one user on high ports in the last minute, and those on ports of BitTorrent."""

    __slots__ = ("hosts", "ports", "trackers", "turn")

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.hosts, self.ports, self.trackers = Targets(), Targets(), Targets()

    def move(self, turn: int) -> None:
        halves, self.turn = turn - self.turn, turn
        for some in (self.hosts, self.ports, self.trackers):
            some.move(halves)

    def add(self, host: int, port: int) -> bool:
        """Add a target. Returns whether all of them are a torrent's."""
        if port in TORRENT_PORTS:
            self.trackers.add(hash((host, port)))
        self.hosts.add(host)
        self.ports.add(port)
        return len(self.trackers) >= TRACKERS or (
            len(self.hosts) >= HOSTS and len(self.ports) >= PORTS * len(self.hosts)
        )


class Watch:
    """What one user has asked for lately. `seen`: when last."""

    __slots__ = ("_scan", "_swarm", "seen")

    def __init__(self, now: float) -> None:
        self.seen = now
        self._scan = _Scan(int(now / SCAN_HALF))
        self._swarm: _Swarm | None = None

    def judge(self, request: Request, now: float) -> Collection[Kind]:
        """The kinds of abuse that this request is a part of. `now`: seconds that never go back."""
        self.seen = now
        scan, turn = self._scan, int(now / SCAN_HALF)
        if turn != scan.turn:
            scan.move(turn)
        target = request.target
        is_new = scan.pairs.add(hash(target))
        if not (is_new or request.torrent or target.endswith(_MAIL)):
            return ()
        host, _, digits = target.rpartition(":")
        # Some servers of a core pass on whatever a user asks for, also thousands of digits.
        port, place, found = int(digits) if digits.isdecimal() and len(digits) <= _DIGITS else 0, hash(host), []
        if is_new and scan.add(place, port, request.udp, request.answered):
            found.append(Kind.SCAN)
        if port == MAIL_PORT and not request.udp:
            found.append(Kind.MAIL)
        swarms = is_new and port >= HIGH and port not in COMMON_PORTS and self._swarms(place, port, now)
        if swarms or request.torrent:
            found.append(Kind.TORRENT)
        return found

    def _swarms(self, host: int, port: int, now: float) -> bool:
        turn = int(now / SWARM_HALF)
        swarm = self._swarm
        if swarm is None:
            swarm = self._swarm = _Swarm(turn)
        elif turn != swarm.turn:
            swarm.move(turn)
        return swarm.add(host, port)


_MAIL = f":{MAIL_PORT}"
# The most digits of a port.
_DIGITS = 5
