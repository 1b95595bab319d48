"""Output of commands, and their exit codes."""

from __future__ import annotations

import json

import pytest

from node.base import errors
from node.base.errors import KINDS, NodeError
from node.client import DeadlineExceeded, UnexpectedReply, Unreachable
from node.nodectl.commands.logs import LEVELS, Wanted, level, source
from node.nodectl.commands.stats import Bytes, Watched, busiest, by_name, rates
from node.nodectl.fleet import Outcome
from node.nodectl.output import Exit, advice_for, as_json, code_of, plain, print_json, size, span, together
from protos import service_pb2 as pb


def test_messages_in_json() -> None:
    """All fields by the proto's names, large integers as integers; an absent message is null."""
    stat = pb.Stat(name="anna", type="uplink", value=2**53 + 1)
    empty = {"name": "", "type": "", "link": "", "value": 0}
    assert as_json(pb.StatResponse(stats=[stat])) == {
        "stats": [empty | {"name": "anna", "type": "uplink", "value": 2**53 + 1}]
    }
    assert as_json(pb.User(email="anna")) == {"email": "anna", "proxies": None, "inbounds": [], "limits": None}
    online = pb.StatsOnlineIpListResponse(ips={"::1": 5})
    assert as_json(online) == {"name": "", "ips": {"::1": 5}, "forwarded": []}
    assert as_json(pb.StatRequest(type=pb.Inbound))["type"] == "Inbound"
    assert as_json({"a": (stat.name, None)}) == {"a": ["anna", None]}


def test_json_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Unprintable characters are escaped; the parsed JSON is the same."""
    texts = ["\x1b[2J", "\x9b2J", "\u202egnp.exe", "\ud800", "Аня ünd 安娜 🙂", "\x7f"]
    print_json(texts)
    written = capsys.readouterr().out
    assert json.loads(written) == texts
    assert written.replace("\n", "").isprintable()
    assert "Аня ünd 安娜 🙂" in written


def test_plain_columns() -> None:
    """They are as wide as their cells, and nothing is truncated."""
    assert plain(("name", "up"), [("a" * 90, "1"), ("b", "22")]) == [
        "name" + " " * 88 + "up",
        "a" * 90 + "  1",
        "b" + " " * 91 + "22",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 1024**4, "5.0 TiB"), (2**63, "8192.0 PiB")],
)
def test_sizes(count: int, text: str) -> None:
    """Bytes in the unit that fits."""
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3700, "1 h 1 min"), (86_400, "1 d"), (200_000, "2 d 7 h")],
)
def test_spans(seconds: int, text: str) -> None:
    """Durations in their two largest units."""
    assert span(seconds) == text


def test_every_error_has_its_code() -> None:
    """Errors that scripts must distinguish have codes of their own; refused and unreachable nodes have advice."""
    codes = {kind: code_of(kind.of_text("text")) for kind in KINDS}
    assert codes[errors.Unauthenticated] is codes[errors.Forbidden] is Exit.KEY_REFUSED
    assert codes[errors.NotInitialized] is codes[errors.NotStarted] is codes[errors.CoreFailed] is Exit.NOT_RUNNING
    assert codes[errors.UsersRefused] is Exit.USERS_REFUSED
    assert codes[errors.InvalidConfig] is codes[errors.Internal] is Exit.FAILED
    lost: list[NodeError] = [Unreachable("x"), DeadlineExceeded("x"), UnexpectedReply("x")]
    assert {code_of(error) for error in lost} == {Exit.UNREACHABLE}
    assert all(map(advice_for, [*lost, errors.Unauthenticated(), errors.NotInitialized()]))


def test_the_code_of_several_nodes() -> None:
    """The code of all nodes, if they agree."""
    assert together([Exit.OK, Exit.OK]) is together([]) is Exit.OK
    assert together([Exit.UNREACHABLE, Exit.UNREACHABLE]) is Exit.UNREACHABLE
    assert together([Exit.OK, Exit.UNREACHABLE]) is together([Exit.KEY_REFUSED, Exit.UNREACHABLE]) is Exit.FAILED


def stats(**users: tuple[int, int]) -> pb.StatResponse:
    return pb.StatResponse(
        stats=[
            pb.Stat(name=name, type=kind, link="traffic", value=value)
            for name, values in users.items()
            for kind, value in zip(("uplink", "downlink"), values, strict=True)
        ]
    )


def test_rates() -> None:
    """The growth divided by the time. A reset counter has grown by its value, a new name by nothing."""
    before, now = (
        by_name(stats(anna=(100, 1000), bert=(50, 50)).stats),
        by_name(stats(anna=(300, 10), cora=(7, 7)).stats),
    )
    assert before["anna"] == Bytes(100, 1000)
    assert rates(before, now, 2.0) == {"anna": Bytes(100.0, 5.0), "cora": Bytes(0.0, 0.0)}


def test_the_busiest_is_first() -> None:
    """Names are sorted by current rate, then by total; an error keeps the last bytes, without rates."""
    watched = Watched("node")
    watched.take(Outcome("node", stats(anna=(0, 0), bert=(0, 10_000))), 0.0)
    assert [line.name for line in busiest([watched])] == ["bert", "anna"]
    watched.take(Outcome("node", stats(anna=(0, 500), bert=(0, 10_000))), 1.0)
    assert [(line.name, sum(line.rate)) for line in busiest([watched])] == [("anna", 500.0), ("bert", 0.0)]
    watched.take(Outcome("node", error=Unreachable("gone")), 2.0)
    assert [(line.name, sum(line.rate)) for line in busiest([watched])] == [("bert", 0.0), ("anna", 0.0)]
    assert watched.error is not None


LINES = {
    "2026/11/22 22:34:08.692214 [Warning] core: Xray 26.3.27 started": ("core", "warning"),
    "+0000 2026-11-22 22:34:08 INFO router: started": ("core", "info"),
    "+0000 2026-11-22 22:34:08 FATAL cannot start": ("core", "error"),
    "2026/11/22 22:34:08 from 192.0.2.1:1 accepted tcp:a:443 [in -> direct] email: anna": ("core", ""),
    "[node] backend running": ("node", ""),
    "[client] the connection broke: lines may be missing here": ("node", ""),
}


@pytest.mark.parametrize("line", LINES)
def test_source_and_level_of_a_line(line: str) -> None:
    """The core or the node; the level, if the line has one."""
    assert (source(line), level(line)) == LINES[line]


def test_which_lines_are_wanted() -> None:
    """All conditions must hold; a line without a level never has the required one."""
    assert [line for line in LINES if Wanted().fits(line)] == list(LINES)
    assert [level(line) for line in LINES if Wanted(least="warning").fits(line)] == ["warning", "error"]
    assert [level(line) for line in LINES if Wanted(least=LEVELS[0], source="node").fits(line)] == []
