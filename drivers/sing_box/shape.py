"""Check the types of values in a sing-box configuration that the node relies on. Pure.

The output of `sing-box format` always has these types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from drivers.process.allowlist import shown
from node.base.errors import InvalidConfig

# A type, a list whose items all have one shape, or an object with the shapes of its optional members.
Shape = type | tuple[type, ...] | list[Any] | Mapping[str, Any]

# The deepest allowed nesting of lists and objects; sing-box nests rules in rules.
DEEPEST = 100
_TYPED = {"type": str, "tag": str}
_HANDLER = {**_TYPED, "transport": {"type": str}}
_INBOUND = {
    **_HANDLER,
    "tls": {"enabled": bool},
    "detour": str,
    "listen": str,
    "listen_port": int,
    "method": str,
    "version": int,
    "network": (str, list),
    "users": [{"name": str, "username": str}],
}
SHAPE: Shape = {
    "log": {"level": str, "disabled": bool, "output": str},
    "dns": {"servers": [_TYPED]},
    "certificate_providers": [_TYPED],
    "endpoints": [_HANDLER],
    "inbounds": [_INBOUND],
    "outbounds": [_HANDLER],
    "route": {"rules": list, "rule_set": [_TYPED]},
    "services": [_TYPED],
    "experimental": {},
}


def check(tree: Any) -> None:
    """Raises `InvalidConfig` for a value of the wrong type, or nesting deeper than DEEPEST."""
    _check(tree, SHAPE, "")
    level: list[Any] = [tree]
    for _ in range(DEEPEST):
        level = [item for value in level for item in _within(value)]
    if level:
        raise InvalidConfig("the configuration is nested too deeply")


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check(value: Any, shape: Shape, where: str) -> None:
    if isinstance(shape, list):
        _is(value, list, where)
        for number, item in enumerate(value):
            _check(item, shape[0], f"{where}[{number}]")
    elif isinstance(shape, Mapping):
        _is(value, dict, where)
        for key in shape.keys() & value.keys():
            _check(value[key], shape[key], f"{where}.{key}")
    else:
        _is(value, shape, where)


def _is(value: Any, kinds: type | tuple[type, ...], where: str) -> None:
    if not isinstance(value, kinds) or (kinds is int and isinstance(value, bool)):
        place = where.removeprefix(".") or "the configuration"
        raise InvalidConfig(
            f"the node cannot parse this configuration: {place} has the wrong type: {shown(str(value))}"
        )
