"""The settings of abuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node.abuse import parsing
from node.base.settings import Options, names, setting, switch
from node.contract.abuse import AbuseRules, ByKind
from node.contract.accounts import key_of


@dataclass(frozen=True)
class AbuseOptions(Options):
    """What the node does about users who abuse the server."""

    everywhere: ByKind = setting("ABUSE", read=parsing.by_kind).help(
        f"what the node does about torrents, port scans and mail of users, such as {parsing.WORDS} (default: nothing); "
        "see docs/abuse.md",
        "The actions are `tell` (an event), `block` (that traffic alone; not for scans), `slow 1M 10m` (bits a second, "
        "and for how long) and `cut 10m` (the user is barred for so long).",
    )
    inbounds: Mapping[str, ByKind] = setting("ABUSE_INBOUNDS", read=parsing.by_inbound).help(
        f"what it does in some inbounds, which takes precedence over ABUSE, such as {parsing.WORDS_OF_INBOUNDS}",
        "Set it if users of some inbounds may do more than the rest, or less. A kind that is not named is as in ABUSE.",
    )
    exempt: frozenset[str] = setting("ABUSE_EXEMPT", read=lambda text: frozenset(map(key_of, names(text)))).help(
        "users whom ABUSE does not concern: e-mails, comma-separated",
        "Set it for users who administer many servers, or measure networks.",
    )
    sniffs: bool = setting("ABUSE_SNIFFING", "off", switch).help(
        "on: inbounds whose configuration sniffs nothing recognise BitTorrent, for ABUSE; targets stay as they are",
        "Where the server speaks first (SSH, mail), each connection then takes 0.2 to 0.3 s longer to open.",
    )

    @property
    def rules(self) -> AbuseRules:
        return AbuseRules(self.everywhere, self.inbounds, self.exempt, self.sniffs)
