"""What ABUSE adds to a configuration; the core accepts it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from drivers.process.allowlist import NOTHING_MORE
from drivers.sing_box import abuse
from drivers.sing_box.config import ApiAddress, Plan, plan
from drivers.sing_box.driver import _sifter
from drivers.sing_box.table import SETTLED, Table
from drivers.sing_box.tally import CLOSED, Stream, Tally
from node.base.errors import InvalidConfig
from node.contract.abuse import AbuseRules as Rules
from node.contract.abuse import Action, Kind, Request, Rule
from protos.sing_box_pb2 import Connection, ConnectionEvent, ConnectionEvents
from scripts.staging.sing_box import find_sing_box
from tests.drivers.sing_box.test_config import HOME, person, rendered
from tests.drivers.sing_box.test_table import listed, streamed

TELL, BLOCK = Rule(Action.TELL), Rule(Action.BLOCK)
DIRECT = {"type": "direct", "tag": "direct"}
SNIFF = {"action": "sniff"}
BOTH = Rules({Kind.TORRENT: BLOCK, Kind.MAIL: BLOCK})


def made(wanted: Rules, **parts: Any) -> Plan:
    inbounds = [{"type": "vless", "tag": "in"}, {"type": "shadowsocks", "tag": "live", "method": "aes-128-gcm"}]
    text = json.dumps({"inbounds": inbounds, "outbounds": [DIRECT], **parts}).encode()
    return plan(text, frozenset(), HOME, True, NOTHING_MORE, against=wanted)


def rules(made: Plan, **users: bytes) -> list[dict[str, Any]]:
    """The rules after the one for the node's APIs."""
    return rendered(made, {"in": users, "live": {}})["route"]["rules"][1:]  # type: ignore[no-any-return]


def without_secrets(made: Plan) -> str:
    tree = rendered(made)
    return json.dumps({key: value for key, value in tree.items() if key not in ("services", "inbounds")})


def test_without_rules_nothing_changes() -> None:
    """The core gets the same as without ABUSE; scans, and mail that is not blocked, add nothing either."""
    plain = made(Rules(), route={"rules": [SNIFF]})
    for wanted in (Rules(sniffs=True), Rules({Kind.SCAN: Rule(Action.CUT, 60), Kind.MAIL: TELL}, sniffs=True)):
        other = made(wanted, route={"rules": [SNIFF]})
        assert without_secrets(other) == without_secrets(plain)
        assert list(other.warnings) == list(plain.warnings)
    assert plain.abuse is abuse.NOTHING and list(plain.tree["outbounds"]) == [DIRECT]


def test_reported() -> None:
    """A configuration that sniffs needs nothing; else the rule that sniffs comes first, if the operator allows it."""
    wanted = Rules({Kind.TORRENT: Rule(Action.CUT, 60)}, {"live": {Kind.TORRENT: Rule(Action.OFF)}}, sniffs=True)
    theirs = {"port": 9, "action": "reject"}
    assert rules(made(wanted, route={"rules": [theirs, SNIFF]})) == [theirs, SNIFF]
    for other in ({}, {"route": {"rules": [theirs]}}, {"route": {"rules": [{**SNIFF, "sniffer": ["tls"]}]}}):
        found = made(wanted, **other)
        ours = {"inbound": ["in"], "action": "sniff", "sniffer": ["bittorrent"]}
        assert rules(found) == [ours, *other.get("route", {}).get("rules", [])]
        assert rendered(found)["outbounds"] == [DIRECT]
        assert any("recognises torrents" in note for note in found.abuse.notes)
    found = made(Rules({Kind.TORRENT: TELL}))
    assert rules(found) == [] and any("ABUSE_SNIFFING" in warning for warning in found.warnings)


def test_blocked() -> None:
    """Ports before all other rules, what is recognised after the one that sniffs; no counter has the outbounds."""
    theirs = {"port": 9, "action": "reject"}
    found = made(BOTH, route={"rules": [theirs, SNIFF, theirs]})
    ports, mail, *others = rules(found)
    assert (ports["inbound"], ports["outbound"]) == (["in", "live"], "~txnode-torrent")
    assert 6881 in ports["port"] and 6969 in ports["port"]
    assert (mail["port"], mail["network"], mail["outbound"]) == ([25], ["tcp"], "~txnode-mail")
    torrent = {
        "inbound": ["in", "live"],
        "protocol": ["bittorrent"],
        "action": "route",
        "outbound": "~txnode-torrent",
    }
    assert others == [theirs, SNIFF, torrent, theirs]
    tree = rendered(found)
    assert [outbound["type"] for outbound in tree["outbounds"]] == ["direct", "block", "block"]
    assert tree["experimental"]["v2ray_api"]["stats"]["outbounds"] == ["direct"]
    assert not any("~" in name for name in found.zero_counters)
    assert rendered(made(BOTH, outbounds=[]))["outbounds"][0] == DIRECT


def test_exempt_users_pass() -> None:
    """Under the names that they have in the core, live users, too."""
    found = made(Rules({Kind.TORRENT: BLOCK}, exempt=frozenset({"a/n@x"})), route={"rules": [SNIFF]})
    account = found.account("in", person("A/n@x"))
    assert account
    for rule in (rules(found, **{"a/n@x": account.packed})[0], rules(found, **{"a/n@x": account.packed})[2]):
        matches, unless = rule["rules"]
        assert (rule["type"], rule["mode"], rule["action"]) == ("logical", "and", "route")
        assert "inbound" in matches and "action" not in matches
        assert unless["invert"] and {"A/n@x", "a/n@x"} < set(unless["auth_user"]) and len(unless["auth_user"]) == 3


def test_a_tag_of_ours_is_refused() -> None:
    """Only where the node adds some."""
    outbounds = [DIRECT, {"type": "direct", "tag": "~txnode-mine"}]
    with pytest.raises(InvalidConfig, match="reserved"):
        made(BOTH, outbounds=outbounds)
    made(Rules(), outbounds=outbounds)


def test_lines_of_our_outbounds_are_withheld() -> None:
    """Those of other outbounds stay, and without any all stay."""
    ours = "INFO [1 0ms] outbound/block[~txnode-torrent]: blocked connection to a:1"
    error = (
        "ERROR [1 1ms] connection: open connection to a:1 using outbound/block[~txnode-mail]: operation not permitted"
    )
    theirs = "INFO [1 0ms] outbound/block[block]: blocked connection to a:1"
    api = ApiAddress(1, "secret")
    assert _sifter(api, True)([ours, theirs, error]) == [theirs]
    assert _sifter(api, False)([ours, theirs]) == [ours, theirs]


def test_our_outbounds_are_not_counted() -> None:
    """In builds without counters, where the node sums them up."""
    tally = Tally()
    connection = Connection(id="1", user="anna", inbound="in", outbound="~txnode-torrent", uplink_total=5)
    Stream(tally).take(ConnectionEvents(events=[ConnectionEvent(id="1", connection=connection)], reset=True))
    assert "user>>>anna>>>traffic>>>uplink" in tally.counters
    assert not any("outbound" in name for name in tally.counters)


# Requests


def begins(id: str, target: str, user: str = "Anna", protocol: str = "", network: str = "tcp") -> ConnectionEvent:
    known = Connection(
        id=id,
        user=user,
        inbound="in",
        source="127.0.0.2:7",
        destination=target,
        protocol=protocol,
        network=network,
    )
    return ConnectionEvent(id=id, connection=known)


def ends(event: ConnectionEvent, down: int = 0) -> ConnectionEvent:
    over = ConnectionEvent(type=CLOSED, id=event.id)
    over.connection.CopyFrom(event.connection)
    over.connection.closed_at, over.connection.downlink_total = 1, down
    return over


def test_requests() -> None:
    """Once each, after a while, with whether the target has answered; also those that ended before they were seen."""
    seen, here = Table(["in"]), bytes([127, 0, 0, 2])
    seen.take(streamed(begins("0", "a:1")), 1.0)
    assert seen.requests((), 1.0) == []
    first = begins("1", "b:2", protocol="bittorrent")
    seen.take(streamed(first, begins("2", "c:3", "bert", network="udp"), begins("3", "d:4")), 2.0)
    seen.take(streamed(ends(first), ends(begins("4", "e:5"))), 2.1)
    seen.take(streamed(ConnectionEvent(type=1, id="3", downlink_delta=7), begins("5", "f:6", "")), 2.2)
    assert seen.requests((), 2.0 + SETTLED / 2) == []
    found = seen.requests({"bert"}, 3.0)
    assert found == [
        Request("anna", here, "in", "b:2", udp=False, torrent=True),
        Request("anna", here, "in", "d:4", udp=False, answered=True),
        Request("anna", here, "in", "e:5", udp=False),
    ]
    assert seen.requests((), 9.0) == []
    seen.take(streamed(ends(first)), 10.0)
    seen.renew(listed(ends(begins("6", "g:7")), begins("7", "h:8")), seen.number, 10.0)
    assert [request.target for request in seen.requests((), 11.0)] == ["h:8"]


@pytest.mark.core
@pytest.mark.parametrize("exempt", [frozenset[str](), frozenset({"anna@x"})])
def test_the_core_takes_it(tmp_path: Path, exempt: frozenset[str]) -> None:
    """All of it at once."""
    wanted = Rules({Kind.TORRENT: BLOCK, Kind.MAIL: BLOCK}, exempt=exempt, sniffs=True)
    inbounds = [{"type": "vless", "tag": "in", "listen": "127.0.0.1", "listen_port": 1}]
    found = plan(json.dumps({"inbounds": inbounds}).encode(), frozenset(), tmp_path, True, NOTHING_MORE, against=wanted)
    tree = rendered(found, {"in": {}})
    del tree["experimental"]
    done = subprocess.run(
        [find_sing_box(), "check", "-c", "stdin"], input=json.dumps(tree).encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
