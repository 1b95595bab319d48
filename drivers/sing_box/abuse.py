"""What ABUSE adds to a configuration: rules, outbounds that block, sniffing. Pure.

What is only reported needs no rule: the core's stream of connections names the protocol that it recognised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivers.process.abuse import PROTOCOL, blocking_notes, listed
from drivers.process.json_text import Json
from node.base.errors import InvalidConfig
from node.contract.abuse import MAIL_PORT, TORRENT_PORTS, AbuseRules, Kind

# The prefix of the outbounds that the node adds, which controllers never see.
OURS = "~txnode-"
TORRENT, MAIL = f"{OURS}torrent", f"{OURS}mail"
# Log lines about them.
LINES = re.compile(rf"outbound/block\[{OURS}")
UNSNIFFED = (
    "ABUSE: the configuration has no rule with the action sniff for bittorrent, so torrents in {} are only recognised "
    "by behaviour and ports; ABUSE_SNIFFING=on adds one"
)


@dataclass(frozen=True)
class Added:
    """What is added: rules before all others, rules after the first one that sniffs (or else with a sniffing one).

    They do not concern users with these keys (`exempt`). `notes` say what is added, `warnings` what is lacking.
    """

    first: tuple[Json, ...] = ()
    sniffed: tuple[Json, ...] = ()
    sniff: Json | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    exempt: frozenset[str] = frozenset()

    @property
    def blocks(self) -> bool:
        return bool(self.first or self.sniffed)

    def outbounds(self, theirs: Sequence[Json]) -> list[Json]:
        """The outbounds with those that block; the default one, which a core without any would add, stays the first."""
        tags = dict.fromkeys(rule["outbound"] for rule in (*self.first, *self.sniffed))
        if not tags:
            return [*theirs]
        return [*(theirs or [{"type": "direct", "tag": "direct"}]), *({"type": "block", "tag": tag} for tag in tags)]

    def rules(self, theirs: Sequence[Json], names: Iterable[str]) -> list[Json]:
        """The rules with those that are added; `names`: of exempt users in the core."""
        exempt = sorted({*names, *self.exempt})
        place = 0 if self.sniff else next((number for number, rule in enumerate(theirs, 1) if _sniffs(rule)), 0)
        ours = [*([self.sniff] if self.sniff else []), *(_sparing(rule, exempt) for rule in self.sniffed)]
        first = [_sparing(rule, exempt) for rule in self.first]
        return [*first, *theirs[:place], *ours, *theirs[place:]]


NOTHING = Added()


def add(tree: Mapping[str, Any], tags: Collection[str], wanted: AbuseRules) -> Added:
    """What ABUSE adds for the inbounds with these tags. Raises `InvalidConfig` for an outbound with a tag of ours."""
    if not wanted:
        return NOTHING
    for outbound in tree.get("outbounds", []):
        if outbound["tag"].startswith(OURS):
            raise InvalidConfig(
                f"the tag {outbound['tag']!r} is reserved: those that begin with {OURS!r} are the node's"
            )
    blocked, reported = wanted.blocked(Kind.TORRENT, tags), wanted.reported(Kind.TORRENT, tags)
    mail, torrents = wanted.blocked(Kind.MAIL, tags), [*blocked, *reported]
    sniffs = any(map(_sniffs, tree.get("route", {}).get("rules", [])))
    sniff = {"inbound": torrents, "action": "sniff", "sniffer": [PROTOCOL]}
    adds_sniff = bool(torrents) and wanted.sniffs and not sniffs
    notes = [
        *blocking_notes(blocked, mail),
        *([f"ABUSE: the node adds a rule that recognises torrents in {listed(torrents)}"] if adds_sniff else []),
    ]
    unsniffed = [UNSNIFFED.format(listed(torrents))] if torrents and not sniffs and not adds_sniff else []
    ports = {"port": sorted(TORRENT_PORTS)}
    return Added(
        first=(*_to(TORRENT, blocked, ports), *_to(MAIL, mail, {"port": [MAIL_PORT], "network": ["tcp"]})),
        sniffed=tuple(_to(TORRENT, blocked, {"protocol": [PROTOCOL]})) if sniffs or adds_sniff else (),
        sniff=sniff if adds_sniff else None,
        notes=tuple(notes),
        warnings=tuple(unsniffed),
        exempt=wanted.exempt,
    )


def _to(outbound: str, inbounds: Sequence[str], what: Json) -> list[Json]:
    return [{"inbound": inbounds, **what, "action": "route", "outbound": outbound}] if inbounds else []


def _sparing(rule: Json, exempt: Sequence[str]) -> Json:
    """The rule for all users but these."""
    if not exempt:
        return rule
    action = {key: rule[key] for key in ("action", "outbound")}
    matches = {key: value for key, value in rule.items() if key not in action}
    return {"type": "logical", "mode": "and", "rules": [matches, {"auth_user": exempt, "invert": True}], **action}


def _sniffs(rule: Mapping[str, Any]) -> bool:
    """Whether a rule has the core recognise BitTorrent."""
    return rule.get("action") == "sniff" and PROTOCOL in (rule.get("sniffer") or [PROTOCOL])
