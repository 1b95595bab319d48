"""What users may not reach through a core: the server itself, and its private networks if the operator says so.

The drivers add it to configurations. Addresses of clouds' metadata services: docs of AWS, Alibaba Cloud and Azure.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_address, ip_network
from typing import NamedTuple

import psutil

from node.base.settings import Setting
from node.contract.driver import Host

# Loopback, "this host", link-local (with the metadata services of most clouds), and the other metadata services.
SERVER = (
    *("127.0.0.0/8", "::1/128", "0.0.0.0/8", "::/128", "169.254.0.0/16", "fe80::/10"),
    *("fd00:ec2::254/128", "100.100.100.200/32", "168.63.129.16/32"),
)
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
BLOCK, RULES, ALLOW = "block", "rules", "allow"
_AUTO, _NONE = "auto", "none"
_MODE = Setting(
    "PROXY_TO_SERVER",
    "block, rules or allow: whether users reach this server itself through the core: loopback, link-local addresses "
    "(a cloud's metadata service), and the node's own ports",
    BLOCK,
    choices=(BLOCK, RULES, ALLOW),
    details="With `rules` the configuration's own routing rules and `finalRules` for such targets come first. See "
    "[proxied-users.md](proxied-users.md).",
)
_PRIVATE = Setting(
    "PROXY_TO_PRIVATE",
    "block or allow: whether users reach private networks through the core (10.0.0.0/8, 192.168.0.0/16, fc00::/7, ...)",
    ALLOW,
    choices=(BLOCK, ALLOW),
    details="Set `block` if other machines of yours listen there. Newer versions of Xray block them by themselves.",
)
_INTERFACE = Setting(
    "PROXY_INTERFACE",
    "the network interface by which users' traffic leaves; none binds the core to no interface; auto chooses it if the "
    "machine has only one",
    _AUTO,
    details="Only cores that check no more than the first packet of a UDP session need it (sing-box, Xray before "
    "26.5.3): bound to an interface, they cannot send the next packets to loopback.",
)
_LEAK = (
    "PROXY_TO_SERVER: within a UDP session users can send later packets to this server itself: this core checks the "
    "first one only. Set PROXY_INTERFACE to the interface by which users' traffic leaves"
)
SETTINGS = (_MODE, _PRIVATE, _INTERFACE)
# Far away by IPv4 and by IPv6: one of the root servers of the DNS.
_ROOT = ("192.33.4.12", "2001:500:2::c")


@dataclass(frozen=True)
class Closed:
    """The targets that no user reaches: `networks`, and these `ports` of the machine's `own` addresses.

    With `yields` the configuration's own rules for such targets come first. `interface` is the one to bind to, if
    need be; empty for none. `chosen`: the node has chosen it. `without_ipv4`: the machine reaches others by IPv6 only.
    """

    networks: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    yields: bool = False
    interface: str = ""
    chosen: bool = False
    without_ipv4: bool = False

    def __bool__(self) -> bool:
        return bool(self.networks)

    @property
    def with_mapped(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`networks` and `own`, with the IPv6 forms of IPv4 addresses (::ffff:127.0.0.1)."""
        return _with_mapped(self.networks), _with_mapped(self.own)

    def covers(self, text: str) -> bool:
        """Whether an address or network is, or overlaps, one that is closed."""
        try:
            asked = ip_network(text, strict=False)
        except ValueError:
            return False
        # Not a network as wide as 0.0.0.0/0, which names no target on purpose.
        return any(
            asked.overlaps(one) and asked.prefixlen >= min(one.prefixlen, 8)
            for one in map(ip_network, self.networks)
            if one.version == asked.version
        )

    @classmethod
    def of(cls, host: Host) -> Closed:
        """Return what the operator has chosen, with the machine's addresses of this moment."""
        mode, private = (_value(host.settings, each) for each in (_MODE, _PRIVATE))
        networks = (*(SERVER if mode != ALLOW else ()), *(PRIVATE if private == BLOCK else ()))
        if not networks:
            return cls()
        chosen = _value(host.settings, _INTERFACE)
        interface = _only_interface() if chosen == _AUTO else "" if chosen == _NONE else chosen
        own, ports = (own_addresses(), tuple(host.ports)) if mode != ALLOW else ((), ())
        six_only = not _has_route(_ROOT[0]) and _has_route(_ROOT[1])
        return cls(networks, own if ports else (), ports, mode == RULES, interface, chosen == _AUTO, six_only)

    @property
    def moved(self) -> str:
        """A warning if the node would bind to no interface now; or ""."""
        if not self.chosen or not self.interface or _only_interface() == self.interface:
            return ""
        return (
            f"PROXY_INTERFACE: the core sends users' traffic by {self.interface} only, as this was the only interface "
            "when the configuration was started: Start again, or set PROXY_INTERFACE"
        )


OPEN = Closed()


class Effect(NamedTuple):
    """What closing a configuration has come to: warnings for the operator, and notes about what was added.

    `binding`: what the outbounds were bound by; it is open where the core needs no interface.
    """

    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    binding: Closed = OPEN

    @classmethod
    def of(cls, closed: Closed, first_only: bool = False, all_bound: bool = True) -> Effect:
        """`first_only`: the core checks the first packet of a UDP session only. `all_bound`: by all outbounds."""
        mode = RULES if closed.yields else BLOCK
        ports = f", nor ports {_listed(closed.ports)} of {_listed(closed.own)}" if closed.own else ""
        bound = f"; direct outbounds use {closed.interface}" if first_only and closed.interface else ""
        note = f"PROXY_TO_SERVER={mode}: users do not reach {_listed(closed.networks)}{ports}{bound}"
        leaks = first_only and not (closed.interface and all_bound)
        return cls([_LEAK] if leaks else (), [note], closed if first_only else OPEN)


def numbers(settings: Mapping[str, str]) -> dict[str, int]:
    """By setting another number for each value that adds something else to a configuration; 0 for nothing."""
    values = {each.name: _value(settings, each) for each in SETTINGS}
    if values[_MODE.name] == values[_PRIVATE.name] == ALLOW:
        return dict.fromkeys(values, 0)
    return {name: 0 if value in (ALLOW, _AUTO) else zlib.crc32(value.encode()) for name, value in values.items()}


def _listed(some: Iterable[object]) -> str:
    return ", ".join(map(str, some))


def _value(settings: Mapping[str, str], setting: Setting) -> str:
    return settings.get(setting.name) or setting.default


def _with_mapped(networks: Sequence[str]) -> tuple[str, ...]:
    some = [one for one in map(ip_network, networks) if isinstance(one, IPv4Network)]
    return (*networks, *(f"::ffff:{one.network_address}/{96 + one.prefixlen}" for one in some))


def own_addresses() -> tuple[str, ...]:
    """The addresses of this machine's interfaces, without those that are closed whatever the port."""
    texts = {one.address.partition("%")[0] for some in psutil.net_if_addrs().values() for one in some}
    found = []
    for text in sorted(texts):
        try:
            address = ip_address(text)
        except ValueError:  # a hardware address
            continue
        if not address.is_loopback and not address.is_link_local:
            found.append(text)
    return tuple(found)


def _has_route(address: str) -> bool:
    """Whether packets to this address would leave the machine; it sends none."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            datagrams.connect((address, 53))
    except OSError:
        return False
    return True


def _only_interface() -> str:
    """The one interface that is up, besides loopback; empty if there are several, as traffic may leave by any."""
    running = [name for name, each in psutil.net_if_stats().items() if each.isup and "loopback" not in each.flags]
    return running[0] if len(running) == 1 else ""
