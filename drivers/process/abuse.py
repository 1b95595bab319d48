"""What the drivers have in common about ABUSE."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from node.contract.abuse import MAIL_PORT

# The cores' word for what they recognise.
PROTOCOL = "bittorrent"


def blocking_notes(torrents: Collection[str], mail: Collection[str]) -> list[str]:
    """Notes about the inbounds in which the core blocks torrents, and mail."""
    blocked = (("torrents are", torrents), (f"mail (port {MAIL_PORT}) is", mail))
    return [f"ABUSE: {what} blocked in {listed(tags)}" for what, tags in blocked if tags]


def listed(tags: Iterable[str]) -> str:
    return ", ".join(map(repr, tags))
