"""Keep the selectors of a configuration, which match outbounds by tag prefix, from matching the node's own. Pure.

The core's Select does not tell the outbound of its API from others (`app/proxyman/outbound/outbound.go`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSequence

from node.base.errors import InvalidConfig
from protos import xray_pb2
from protos.xray_pb2 import Config

# The prefix of tags that the node adds, and of no others.
OURS = "~txnode-"
_BEGINNINGS = frozenset(OURS[:length] for length in range(len(OURS) + 1))
# The most tags that all selectors of a configuration together may expand to.
MOST = 1_000_000
_ROUTER = "xray.app.router.Config"
_REVERSE = "xray.app.reverse.Config"
OBSERVATORIES = ("xray.core.app.observatory.Config", "xray.core.app.observatory.burst.Config")


def bind(base: Config) -> None:
    """Expand each selector that could match the node's tags to the outbounds of the configuration that it matches.

    Raises `InvalidConfig` for tags that a selector could not tell from the node's.
    """
    outbounds = [tag for tag in dict.fromkeys(_outbounds(base)) if tag]
    for tag in (*outbounds, *(inbound.tag for inbound in base.inbound if inbound.tag)):
        if _could_be_ours(tag):
            raise InvalidConfig(f"the tag {tag!r} is too similar to the node's own, which begin with {OURS!r}")
    reached = {beginning: [tag for tag in outbounds if tag.startswith(beginning)] for beginning in _BEGINNINGS}
    room = MOST
    for app in base.app:
        if app.type == _ROUTER:
            router = xray_pb2.RouterConfig.FromString(app.value)
            for balancer in router.balancing_rule:
                room = _write_out(balancer.outbound_selector, reached, room)
            app.value = router.SerializeToString()
        elif app.type in OBSERVATORIES:
            observatory = xray_pb2.ObservatoryConfig.FromString(app.value)
            room = _write_out(observatory.subject_selector, reached, room)
            app.value = observatory.SerializeToString()


def _outbounds(base: Config) -> Iterator[str]:
    """The tags of all outbounds, with the portals of reverse proxies."""
    for outbound in base.outbound:
        yield outbound.tag
    yield from portals(base)


def portals(base: Config) -> Iterator[str]:
    """The tags of the portals of reverse proxies."""
    for app in base.app:
        if app.type == _REVERSE:
            for portal in xray_pb2.ReverseConfig.FromString(app.value).portal_config:
                yield portal.tag


def _write_out(selectors: MutableSequence[str], reached: Mapping[str, list[str]], room: int) -> int:
    """Expand the selectors in place. Returns how many more tags are allowed."""
    wide = [reached[beginning] for beginning in _BEGINNINGS.intersection(selectors)]
    room -= sum(map(len, wide))
    if room < 0:
        raise InvalidConfig(f"the selectors of balancers and observatories match more than {MOST:,} outbounds in all")
    narrow = (selector for selector in selectors if not _could_be_ours(selector))
    selectors[:] = dict.fromkeys((*narrow, *(tag for tags in wide for tag in tags)))
    return room


def _could_be_ours(beginning: str) -> bool:
    """Whether it is a prefix of the node's tags, or begins with theirs."""
    return beginning in _BEGINNINGS or beginning.startswith(OURS)
