"""Read, and never edit, the controller's JSON: the few facts that Xray's own conversion loses. Pure.

As Xray does, this accepts keys in any case and comments (`//`, `#`, `/* */`). A text that cannot be parsed here is no
error: the core decides whether it is valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from ipaddress import ip_network
from typing import Any, NamedTuple

from drivers.process.json_text import bare, parse, texts

# Numbers may be of any length; none is needed here, so they stay text.
_LENIENT = json.JSONDecoder(parse_int=str, parse_float=str)
# A geo list in a rule or the DNS, also as a key of its hosts. One text may have several.
_GEO_LIST = re.compile(r"(?:^|,)\s*!*(?:geoip|geosite|ext(?:-\w+)?):", re.IGNORECASE)


class Hints(NamedTuple):
    """Defaults for users in an inbound's settings. `renamed`: its own users are in `users`, not in `clients`."""

    flow: str = ""
    method: str = ""
    renamed: bool = False


def top(text: str) -> frozenset[str] | None:
    """The top-level keys in lower case; as the core does, this reads the first JSON value only.

    None if the text cannot be parsed.
    """
    try:
        value = _first(text)
    except (ValueError, RecursionError):
        return None
    return frozenset(map(str.lower, value)) if isinstance(value, dict) else None


def _first(text: str) -> Any:
    try:
        return _LENIENT.raw_decode(text.lstrip())[0]
    except json.JSONDecodeError:
        return _LENIENT.raw_decode(bare(text).lstrip())[0]


def hints(text: str, inbounds: int) -> list[Hints]:
    """The hints of each inbound, in order; empty ones if the text cannot be parsed or has not as many inbounds."""
    try:
        found = list(_hints(parse(text)))
    except (ValueError, RecursionError):
        found = []
    return found if len(found) == inbounds else [Hints()] * inbounds


def names_lists(text: str) -> bool:
    """Whether a text may name geo files; True for one that cannot be parsed."""
    try:
        tree = parse(text)
    except ValueError:
        return True
    return any(_GEO_LIST.search(word) for named in texts(tree) for word in (named.key, named.text))


def servers(text: str) -> list[str]:
    """The addresses of the servers of outbounds."""
    try:
        outbounds = _get(parse(text), "outbounds")
    except (ValueError, RecursionError):
        return []
    return [named.text for named in texts(outbounds) if named.key.lower() == "address"]


def private_targets(text: str) -> frozenset[str]:
    """The tags of outbounds to which routing rules send private addresses."""
    rules = _rules(text)
    return frozenset(str(_get(rules[number], "outboundtag")) for number in _with_private(rules, names=False))


def private_rules(text: str) -> list[int]:
    """The indices of the routing rules that name private addresses or `localhost`."""
    return _with_private(_rules(text), names=True)


def _rules(text: str) -> list[Any]:
    try:
        rules = _get(_get(parse(text), "routing"), "rules")
    except (ValueError, RecursionError):
        return []
    return rules if isinstance(rules, list) else []


def _with_private(rules: list[Any], names: bool) -> list[int]:
    def is_one(rule: Any) -> bool:
        local = names and any(one.rpartition(":")[2] == "localhost" for one in _strings(_get(rule, "domain")))
        return local or any(map(_is_private, _strings(_get(rule, "ip"))))

    return [number for number, rule in enumerate(rules) if is_one(rule)]


def _is_private(text: str) -> bool:
    if text.lower() == "geoip:private":
        return True
    try:
        return ip_network(text, strict=False).is_private
    except ValueError:
        return False


def _strings(value: Any) -> list[str]:
    """A list of texts as the core reads it: also one text, split at commas."""
    texts = value if isinstance(value, list) else [value]
    return [part.strip() for text in texts if isinstance(text, str) for part in text.split(",")]


def _hints(config: Any) -> Iterator[Hints]:
    inbounds = _get(config, "inbounds")
    for inbound in inbounds if isinstance(inbounds, list) else []:
        settings = _get(inbound, "settings")
        flow, method = _get(settings, "flow"), _get(settings, "method")
        renamed = bool(_get(settings, "users")) and not _get(settings, "clients")
        yield Hints(flow if isinstance(flow, str) else "", method if isinstance(method, str) else "", renamed)


def _get(value: Any, name: str) -> Any:
    """An object's member by name in any case, as in Go's decoder; `name` is in lower case."""
    if not isinstance(value, dict):
        return None
    return next((member for key, member in value.items() if key.lower() == name), None)
