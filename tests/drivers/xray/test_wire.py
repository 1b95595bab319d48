"""Messages to Xray that are written by hand are what protobuf would write."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drivers.xray.accounts import BUILDERS, Inbound, email_of, pack
from drivers.xray.api import Operation, _request
from drivers.xray.wire import SIZE, field
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
    """Bytes of any length are framed as protobuf frames them."""
    assert field(b"\x12", value) == TypedMessage(value=value).SerializeToString() or not value


def test_what_is_looked_up_is_not_all() -> None:
    """A size that is not in the table is written all the same, and not kept."""
    kept = len(SIZE)
    assert SIZE[300] == b"\xac\x02"
    assert SIZE[1 << 21] == b"\x80\x80\x80\x01"
    assert len(SIZE) == kept


@given(texts, st.binary(max_size=300))
def test_a_user(email: str, account: bytes) -> None:
    """A user reads back as he was written, by protobuf and by what looks for his name alone."""
    packed = pack(email, "some.Account", account)
    user = xray_pb2.User.FromString(packed)
    assert (user.email, user.account.type, user.account.value) == (email, "some.Account", account)
    assert email_of(packed) == email


@given(texts, st.integers(0, 9))
def test_a_name_in_the_core_s_own_words(email: str, level: int) -> None:
    """The core writes a user's level before his name, and leaves out what is empty."""
    assert email_of(xray_pb2.User(level=level, email=email).SerializeToString()) == email


@given(texts, texts, st.binary(max_size=300))
def test_an_operation(tag: str, email: str, account: bytes) -> None:
    """Adding and removing a user of an inbound."""
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
    """The account that most users have is the same message as protobuf's."""
    identity = "b831381d-6324-4d53-ad4f-8cda48b30811"
    user = service_pb2.User(email="ann", proxies={"vless": {"id": identity, "flow": flow}})
    account = BUILDERS["vless"](Inbound("in", "vless", vision=True), user)
    assert account
    value = xray_pb2.User.FromString(account.packed).account.value
    assert value == xray_pb2.VlessAccount(id=identity, flow=flow).SerializeToString()
