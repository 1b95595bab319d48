"""Accounts of users, compared with what the real core makes of the same credentials."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.process.credentials import KEY_BYTES, parse_uuid, shadowsocks_2022_key
from drivers.xray.accounts import BUILDERS, CIPHERS, VISION, Inbound
from node.contract.accounts import Account, Unusable
from protos import service_pb2 as pb
from protos import xray_pb2
from tests.harness.convert import convert, refuses

ID = "b831381d-6324-4d53-ad4f-8cda48b30811"
OTHER = "aaaaaaaa-6324-4d53-ad4f-8cda48b30811"

M = TypeVar("M", bound=Message)


def user(**proxies: Message) -> pb.User:
    return pb.User(email="Ann", proxies=pb.Proxy(**proxies))  # type: ignore[arg-type]


def vless(text: str, flow: str = "") -> pb.User:
    return user(vless=pb.Vless(id=text, flow=flow))


def shadowsocks(password: str, method: str = "") -> pb.User:
    return user(shadowsocks=pb.Shadowsocks(password=password, method=method))


def build(inbound: Inbound, person: pb.User) -> Account:
    account = BUILDERS[inbound.protocol](inbound, person)
    assert account is not None
    return account


def unpacked(account: Account, kind: type[M], type_name: str) -> M:
    """The account in a packed user, who must be ours."""
    packed = xray_pb2.User.FromString(account.packed)
    assert (packed.email, packed.level, packed.account.type) == ("Ann", 0, type_name)
    return kind.FromString(packed.account.value)


def converted(protocol: str, client: dict[str, object], **settings: object) -> bytes:
    """The user that the core itself makes of a client in its JSON, serialised."""
    inbound = {
        "tag": "in",
        "port": 1000,
        "protocol": protocol,
        "settings": {**settings, "clients": [{**client, "email": "Ann"}]},
    }
    handler = xray_pb2.Config.FromString(convert(json.dumps({"inbounds": [inbound]}))).inbound[0]
    if handler.proxy_settings.type.startswith("xray.proxy.shadowsocks_2022"):
        return (
            xray_pb2.Shadowsocks2022MultiUserConfig.FromString(handler.proxy_settings.value)
            .users[0]
            .SerializeToString()
        )
    return xray_pb2.UsersConfig.FromString(handler.proxy_settings.value).users[0].SerializeToString()


KEY_16, KEY_32 = (base64.b64encode(bytes(range(size))).decode() for size in (16, 32))
PAIRS: list[tuple[Inbound, pb.User, Callable[[], bytes]]] = [
    (
        Inbound("in", "vless", vision=True),
        vless(ID, VISION),
        lambda: converted("vless", {"id": ID, "flow": VISION}, decryption="none"),
    ),
    (Inbound("in", "vless"), vless(ID), lambda: converted("vless", {"id": ID}, decryption="none")),
    (Inbound("in", "trojan"), user(trojan=pb.Trojan(password="pä")), lambda: converted("trojan", {"password": "pä"})),
    (
        Inbound("in", "hysteria"),
        user(hysteria=pb.Hysteria(auth="secret")),
        lambda: converted("hysteria", {"auth": "secret"}, version=2),
    ),
    *[
        (
            Inbound("in", "shadowsocks"),
            shadowsocks("secret", method),
            lambda method=method: converted("shadowsocks", {"method": method, "password": "secret"}),
        )
        for method in CIPHERS
    ],
    *[
        (
            Inbound("in", "shadowsocks_2022", method=method),
            shadowsocks(key),
            lambda method=method, key=key: converted("shadowsocks", {"password": key}, method=method, password=key),
        )
        for method, key in zip(KEY_BYTES, (KEY_16, KEY_32), strict=True)
    ],
]


@pytest.mark.core
@pytest.mark.parametrize(("inbound", "person", "core"), PAIRS, ids=lambda value: getattr(value, "protocol", ""))
def test_accounts_are_the_cores_own(inbound: Inbound, person: pb.User, core: Callable[[], bytes]) -> None:
    """A supplied user becomes byte for byte the message that the core makes of the same client in its JSON."""
    ours, theirs = xray_pb2.User.FromString(build(inbound, person).packed), xray_pb2.User.FromString(core())
    assert ours == theirs


@pytest.mark.core
def test_vmess() -> None:
    """A VMess account has the id as a UUID; the core's own conversion adds only the client's cipher."""
    account = build(Inbound("in", "vmess"), user(vmess=pb.Vmess(id=ID.upper())))
    assert unpacked(account, xray_pb2.VmessAccount, "xray.proxy.vmess.Account").id == ID
    theirs = xray_pb2.User.FromString(converted("vmess", {"id": ID}))
    assert theirs.account.type == "xray.proxy.vmess.Account"
    assert xray_pb2.VmessAccount.FromString(theirs.account.value).id == ID


@pytest.mark.parametrize("protocol", BUILDERS)
def test_an_empty_credential_is_none(protocol: str) -> None:
    """A user with an empty credential, or only those of other protocols, has no account."""
    method = "2022-blake3-aes-128-gcm" if protocol == "shadowsocks_2022" else ""
    empty = user(
        vless=pb.Vless(flow=VISION),
        vmess=pb.Vmess(),
        trojan=pb.Trojan(),
        shadowsocks=pb.Shadowsocks(method="aes-128-gcm"),
        hysteria=pb.Hysteria(),
        wireguard=pb.Wireguard(peer_ips=["10.0.0.2/32"]),
        masque=pb.Masque(**{"pass": "x"}),
    )
    for person in (empty, user()):
        assert BUILDERS[protocol](Inbound("in", protocol, method=method), person) is None


# UUIDs

HASHED = ["a", "short", "x" * 30, "ü" * 15, "日本語", "{b831381d-6324}", "b831381d63244d53ad4f8cda48b308"]
SPELLED = [
    ID,
    ID.upper(),
    ID.replace("-", ""),
    ID.replace("-", "", 1),
    ID.replace("-", "")[:8] + ID[8:].replace("-", ""),
]


def core_id(text: str) -> str:
    """The id that the core makes of a text."""
    return xray_pb2.VlessAccount.FromString(
        xray_pb2.User.FromString(converted("vless", {"id": text}, decryption="none")).account.value
    ).id


@pytest.mark.core
@pytest.mark.parametrize("text", [*HASHED, *SPELLED])
def test_ids_as_the_core_reads_them(text: str) -> None:
    """UUIDs in any case, with or without hyphens, and short texts that are hashed, equal the core's ids."""
    assert parse_uuid(text)[0] == core_id(text)


@pytest.mark.core
@pytest.mark.parametrize(
    "text",
    ["x" * 31, "ü" * 16, "x" * 37, ID[:-1] + "g", f"{{{ID}}}", f"urn:uuid:{ID}", "b-831381d63244d53ad4f8cda48b30811"],
)
def test_ids_that_the_core_refuses(text: str) -> None:
    """A text that is neither a UUID nor short enough to be hashed is refused, as in the core."""
    assert refuses(json.dumps({"inbounds": [_vless_inbound(text)]}))
    with pytest.raises(Unusable):
        parse_uuid(text)


def _vless_inbound(text: str) -> dict[str, object]:
    clients = [{"id": text, "email": "Ann"}]
    return {"tag": "in", "port": 1000, "protocol": "vless", "settings": {"decryption": "none", "clients": clients}}


@settings(deadline=None)
@given(st.text(min_size=1, max_size=60))
def test_any_id_is_a_uuid_or_unusable(text: str) -> None:
    """Any id is parsed or refused; the result parses to itself."""
    try:
        canonical, identity = parse_uuid(text)
    except Unusable:
        assert len(text.encode()) > 30
    else:
        assert parse_uuid(canonical) == (canonical, identity)


# Credentials


def test_vless_ids_that_the_core_cannot_tell_apart() -> None:
    """Ids that differ in bytes 6 and 7 alone are one credential in VLESS, but two in VMess."""
    alike = ID[:14] + "5abc" + ID[18:]
    assert len(alike) == len(ID)
    inbound = Inbound("in", "vless")
    assert build(inbound, vless(ID)).credential == build(inbound, vless(alike)).credential
    assert build(inbound, vless(ID)).credential != build(inbound, vless(OTHER)).credential
    vmess = [build(Inbound("in", "vmess"), user(vmess=pb.Vmess(id=text))).credential for text in (ID, alike)]
    assert vmess[0] != vmess[1]


def test_credentials_do_not_depend_on_spelling() -> None:
    """Two spellings of an id are the same credential."""
    assert len({build(Inbound("in", "vless"), vless(text)).credential for text in SPELLED}) == 1


def test_shadowsocks_credentials_are_cipher_and_password() -> None:
    """Two ciphers with one password are two credentials; two names of a cipher are one."""
    inbound = Inbound("in", "shadowsocks")
    one, alias, other = (
        build(inbound, shadowsocks("x", method)).credential
        for method in ("aes-128-gcm", "AEAD_AES_128_GCM", "aes-256-gcm")
    )
    assert one == alias != other


# Flow


@pytest.mark.parametrize(
    ("vision", "prescribed", "asked", "given"),
    [
        (True, "", VISION, VISION),
        (True, "", "", ""),
        (True, VISION, "", VISION),
        (False, "", VISION, ""),
        (False, VISION, VISION, ""),
        (False, "", "", ""),
    ],
)
def test_vision_where_it_fits(vision: bool, prescribed: str, asked: str, given: str) -> None:
    """A user has Vision if they or their inbound ask for it and the inbound can carry it; else they connect without."""
    account = build(Inbound("in", "vless", vision, prescribed), vless(ID, asked))
    assert unpacked(account, xray_pb2.VlessAccount, "xray.proxy.vless.Account").flow == given


@pytest.mark.parametrize("flow", ["xtls-rprx-direct", "XTLS-RPRX-VISION", "none", "x"])
def test_unknown_flows(flow: str) -> None:
    """A user with an unknown flow is refused, whether or not the inbound could carry one."""
    for vision in (True, False):
        with pytest.raises(Unusable, match=flow):
            build(Inbound("in", "vless", vision), vless(ID, flow))


# Shadowsocks


@pytest.mark.parametrize(
    ("own", "inbound", "cipher"),
    [("", "", 7), ("", "aes-256-gcm", 6), ("aes-128-gcm", "aes-256-gcm", 5), ("XChaCha20-Poly1305", "", 8)],
)
def test_the_method_of_a_user(own: str, inbound: str, cipher: int) -> None:
    """The method is the user's own, else the inbound's, else the default; in any case of letters."""
    account = build(Inbound("in", "shadowsocks", method=inbound), shadowsocks("x", own))
    message = unpacked(account, xray_pb2.ShadowsocksAccount, "xray.proxy.shadowsocks.Account")
    assert (message.cipher_type, message.password) == (cipher, "x")


@pytest.mark.parametrize("method", ["none", "plain", "rc4-md5", "2022-blake3-aes-128-gcm"])
def test_unknown_methods(method: str) -> None:
    """A user with an unknown cipher, or one that cannot tell users apart, is refused."""
    with pytest.raises(Unusable, match=method):
        build(Inbound("in", "shadowsocks"), shadowsocks("x", method))


@settings(deadline=None)
@given(st.text(min_size=1, max_size=50), st.sampled_from([16, 32]))
def test_keys_of_the_right_size(password: str, size: int) -> None:
    """Any password gives a key of the method's size, and base64 of such a key gives that key."""
    key = shadowsocks_2022_key(password, size)
    assert len(key) == size
    assert shadowsocks_2022_key(base64.b64encode(key).decode(), size) == key


@pytest.mark.parametrize(
    "password", ["secret", KEY_16[:-2], KEY_16 + "\n", "*" * 24, "ключ", base64.b64encode(bytes(17)).decode()]
)
def test_other_passwords_are_hashed(password: str) -> None:
    """Text that is not base64 of the right size is hashed, as controllers do for a user's link."""
    digest = hashlib.sha256(password.encode()).digest()
    for size in (16, 32):
        assert shadowsocks_2022_key(password, size) == digest[:size]


def test_a_key_of_the_other_size_is_hashed() -> None:
    """A key for the other method is hashed like any password."""
    assert shadowsocks_2022_key(KEY_32, 16) == hashlib.sha256(KEY_32.encode()).digest()[:16]
    assert shadowsocks_2022_key(KEY_32, 32) == bytes(range(32))
