"""Pure parsers of bytes from strangers and controllers: whatever the bytes are, they only ever raise a refusal.

Some 10,000 examples in all, with tests/drivers/xray/test_access.py, and a hundred times as many with
`--hypothesis-profile=nightly --timeout=0`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, given, settings

from drivers.pretended.scripted import MemoryPlan
from drivers.registry import DRIVER_SETTINGS
from node.api.auth import Authenticator
from node.api.calls import parse
from node.api.framing import delimited
from node.api.methods import METHODS
from node.backend.roster import Roster
from node.base.errors import InvalidRequest, Unauthenticated
from node.contract.accounts import key_of
from node.door.bodies import Bodies
from node.door.manners import STRANGERS_REQUESTS, Manners
from node.http2.frames import PREFACE, Violation
from node.keys.options import DEFAULT_KEY, MIN_KEY
from node.settings import BadSettings, load
from protos.service_pb2 import Users
from scripts.attack import http2, messages
from scripts.attack.mutate import mutated, pieces
from tests.harness.many import many, seeds
from tests.harness.strangers import nobody

KEY = "3f2b8c1e-0d5a-4b6f-9a77-1c2d3e4f5a6b"
FEED = next(method for method in METHODS if method.cut is delimited)
SYNC = next(method for method in METHODS if method.name == "SyncUsers")


@many
@given(seeds)
def test_any_frames(seed: int) -> None:
    """A connection goes on or ends, the same however its bytes are cut; the memory for it is bounded."""
    random = Random(seed)
    data = http2.frames(random) if random.random() < 0.9 else http2.calls(KEY, random)[len(PREFACE) :]
    data = PREFACE + mutated(data, random)
    assert judged([data]) == judged(pieces(data, random))


def judged(parts: list[bytes]) -> object:
    """The outcome of these bytes, as a client's and as a server's."""
    manners = Manners(0.0, nobody, Bodies())
    try:
        for part in parts:
            manners.received(part, 0.0, False)
    except Violation as error:
        return error.code
    assert len(manners.open) <= STRANGERS_REQUESTS[0]
    opened = manners.open.copy()
    for part in parts:
        manners.sent(part[len(PREFACE) :])
    return opened, manners.last, manners.asked


@many
@given(seeds)
def test_any_body(seed: int) -> None:
    """It is split into messages, or refused; each message is a part of the body."""
    random = Random(seed)
    method = random.choice(METHODS)
    data = messages.body(method, random)
    with suppress(InvalidRequest):
        parts = list(delimited(data))
        assert sum(map(len, parts)) <= len(data)
        assert all(parse(FEED, part) is not None for part in parts)
    with suppress(InvalidRequest):
        assert parse(method, data).IsInitialized()


@many
@given(seeds)
def test_any_users(seed: int) -> None:
    """Each user is accepted, or refused by name, and all users of the target are among them."""
    random = Random(seed)
    with suppress(InvalidRequest):
        message = parse(SYNC, mutated(messages.valid(SYNC, random), random))
        assert isinstance(message, Users)
        plan = MemoryPlan("", ("in-0", "a"))
        roster, refused = Roster.of(message.users, plan.tags, plan.account)
        names = {user.email for user in message.users}
        assert {refusal.email for refusal in refused} <= names
        assert roster.users.keys() <= set(map(key_of, names))


@many
@given(seeds)
def test_any_key(seed: int) -> None:
    """Only the key is accepted, and any text is compared with it."""
    random = Random(seed)
    header = mutated(random.choice((f"Bearer {KEY}", KEY)).encode(), random)
    text = header.decode("utf-8", random.choice(("surrogateescape", "replace")))
    try:
        caller = Authenticator(KEY).check([text], []) if random.random() < 0.5 else Authenticator(KEY).check([], [text])
    except Unauthenticated:
        return
    assert caller.key.name == DEFAULT_KEY
    assert "".join(KEY.split("-")) in text.lower().replace("-", ""), text


@settings(many, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seeds)
def test_any_settings(tmp_path: Path, seed: int) -> None:
    """A file of settings is parsed, or its faults are listed."""
    random = Random(seed)
    valid = (
        f"API_KEY={KEY}\nREST_PORT=1234\nSSL_CERT_FILE='a'\nTRAFFIC_INTERVAL=0.5\nexport DEBUG=1\n# x\nSTATE_DIR=~/x\n"
    )
    (tmp_path / ".env").write_bytes(mutated(valid.encode(), random))
    (tmp_path / "certificate.pem").touch()
    try:
        found = load({"STATE_DIR": "."}, tmp_path, {}, drivers=DRIVER_SETTINGS)
    except BadSettings as error:
        assert error.faults
    else:
        assert len(found.keys.key) >= MIN_KEY
