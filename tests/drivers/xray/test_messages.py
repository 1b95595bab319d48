"""Messages to Xray that are encoded by hand equal those of protobuf."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drivers.xray.accounts import BUILDERS, Inbound, email_of, named, pack
from drivers.xray.api import Operation, _request
from drivers.xray.messages import SIZE, field
from node.contract.counters import SEPARATOR
from protos import service_pb2, xray_pb2
from protos.xray_pb2 import AlterInboundRequest, TypedMessage

texts = st.text(max_size=300)


@given(st.binary(max_size=70_000))
@example(b"x" * 127)
@example(b"x" * 128)
@example(b"x" * 511)
@example(b"x" * 512)
@example(b"x" * 16384)
def test_a_field(value: bytes) -> None:
    """Fields of any length are encoded as by protobuf."""
    assert field(b"\x12", value) == TypedMessage(value=value).SerializeToString() or not value


def test_sizes_outside_the_table() -> None:
    """A size outside the table is encoded, too, and not stored."""
    kept = len(SIZE)
    assert SIZE[300] == b"\xac\x02"
    assert SIZE[1 << 21] == b"\x80\x80\x80\x01"
    assert len(SIZE) == kept


@given(texts, st.binary(max_size=300))
def test_a_user(email: str, account: bytes) -> None:
    """A user decodes as encoded, by protobuf and by the function that reads only the e-mail."""
    packed = pack(email, "some.Account", account)
    user = xray_pb2.User.FromString(packed)
    assert (user.email, user.account.type, user.account.value) == (email, "some.Account", account)
    assert email_of(packed) == email


@given(texts, st.integers(0, 9))
def test_an_email_as_the_core_writes_it(email: str, level: int) -> None:
    """The core writes a user's level before their e-mail, and leaves out empty fields."""
    assert email_of(xray_pb2.User(level=level, email=email).SerializeToString()) == email


@given(texts, texts, st.binary(max_size=300))
@example("in", "a" * 128, b"")
def test_an_operation_by_another_name(tag: str, email: str, account: bytes) -> None:
    """The core gets the user's name with an end, whatever the length; the account stays."""
    packed, end = pack(email, "some.Account", account), f"{SEPARATOR}12"
    wanted = xray_pb2.User.FromString(packed)
    wanted.email += end
    added = AlterInboundRequest.FromString(_request(Operation(tag, email, packed), end))
    assert xray_pb2.AddUserOperation.FromString(added.operation.value).user == wanted
    removed = AlterInboundRequest.FromString(_request(Operation(tag, email, None), end))
    assert xray_pb2.RemoveUserOperation.FromString(removed.operation.value).email == email + end
    assert named(packed, "") == packed
    as_the_core_writes_it = xray_pb2.User(level=1, email=email).SerializeToString()
    assert email_of(named(as_the_core_writes_it, end)) == email + end


@given(texts, texts, st.binary(max_size=300))
def test_an_operation(tag: str, email: str, account: bytes) -> None:
    """Add and remove a user of an inbound."""
    packed = pack(email, "some.Account", account)
    added = AlterInboundRequest.FromString(_request(Operation(tag, email, packed)))
    removed = AlterInboundRequest.FromString(_request(Operation(tag, email, None)))
    assert {added.tag, removed.tag} == {tag}
    assert added.operation.type == "xray.app.proxyman.command.AddUserOperation"
    addition = xray_pb2.AddUserOperation.FromString(added.operation.value)
    assert addition == xray_pb2.AddUserOperation(user=xray_pb2.User.FromString(packed))
    assert removed.operation.type == "xray.app.proxyman.command.RemoveUserOperation"
    assert xray_pb2.RemoveUserOperation.FromString(removed.operation.value).email == email


@pytest.mark.parametrize("flow", ["", "xtls-rprx-vision"])
def test_a_vless_account(flow: str) -> None:
    """The most common account equals protobuf's message."""
    identity = "b831381d-6324-4d53-ad4f-8cda48b30811"
    user = service_pb2.User(email="ann", proxies={"vless": {"id": identity, "flow": flow}})
    account = BUILDERS["vless"](Inbound("in", "vless", vision=True), user)
    assert account
    value = xray_pb2.User.FromString(account.packed).account.value
    assert value == xray_pb2.VlessAccount(id=identity, flow=flow).SerializeToString()
