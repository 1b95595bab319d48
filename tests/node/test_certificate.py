"""node.certificate: for clients that pin the PEM and panels that store it; only the owner can read the key."""

from __future__ import annotations

import os
import ssl
import stat
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from hypothesis import given, settings
from hypothesis import strategies as st

from node.certificate import MAX_PEM, BadName, ensure, ensure_api_key, main, make, own_names

OWN = ("box", "box.example", "localhost", "127.0.0.1", "::1", "192.0.2.7")


def own() -> tuple[str, ...]:
    return OWN


def never() -> Iterator[str]:
    raise AssertionError("the machine's names were asked for")


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Do both sides of a TLS handshake in memory; raise the client's error."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    for _ in range(10):
        for side in (ours, theirs):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
    assert done == {ours, theirs}


@pytest.mark.parametrize("name", [*OWN, "node.example", "203.0.113.9", "2001:db8::9"])
def test_a_client_that_pins_the_pem_accepts_every_name_in_it(tmp_path: Path, name: str) -> None:
    """The PEM is enough as the only root, strictly, with host-name checking on, for names and addresses alike."""
    made = ensure(tmp_path / "tls", ["node.example", "203.0.113.9", "2001:db8::9"], own)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.certificate, made.key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=made.certificate.read_text())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    assert client.check_hostname
    handshake(server, client, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(server, client, "other.example")


def test_names_come_in_order_and_once(tmp_path: Path) -> None:
    """Extra names come first, then the machine's own; a repeated one counts once, also in another spelling."""
    made = ensure(tmp_path, ["Box.Example", "0:0::1", "*.example"], own)
    assert made.names == ("box.example", "::1", "*.example", "box", "localhost", "127.0.0.1", "192.0.2.7")
    assert made.left_out == ()


def test_names_without_room_are_reported(tmp_path: Path) -> None:
    """The PEM stays within what panels store, the first names are in, and all others are reported."""
    extra = [f"{'n' * 60}.{index:02}.example" for index in range(40)]
    made = ensure(tmp_path, extra, own)
    assert len(made.certificate.read_text()) <= MAX_PEM
    assert made.names[:5] == tuple(extra[:5])
    assert set(made.names) | set(made.left_out) == {*extra, *OWN}
    assert not set(made.names) & set(made.left_out)
    assert extra[-1] in made.left_out


@settings(max_examples=25, deadline=None)
@given(st.lists(st.from_regex(r"[a-z]{1,60}\.[a-z]{1,60}", fullmatch=True) | st.ip_addresses().map(str), min_size=1))
def test_no_list_of_names_makes_too_large_a_pem(names: list[str]) -> None:
    """Whatever the names are, the PEM has at most 2,048 characters, and every name is either in or reported."""
    certificate, _, left_out = make(names)
    sans = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    inside = [str(name.value) for name in sans]
    assert len(certificate.public_bytes(Encoding.PEM)) <= MAX_PEM
    assert inside == [name for name in dict.fromkeys(names) if name not in left_out]


def test_a_certificate_does_not_name_the_product() -> None:
    """Strangers see its subject; it differs from one certificate to the next, as clients look issuers up by name."""
    first, second = (make(OWN)[0] for _ in range(2))
    assert b"txnode" not in first.public_bytes(Encoding.DER).lower()
    assert first.subject == first.issuer != second.subject


def test_validity(tmp_path: Path) -> None:
    """It is valid since yesterday, because clocks differ, and for ten years."""
    parsed = x509.load_pem_x509_certificate(ensure(tmp_path, (), own).certificate.read_bytes())
    now = datetime.now(UTC)
    assert timedelta(hours=23) < now - parsed.not_valid_before_utc < timedelta(hours=25)
    assert now.year + 9 <= parsed.not_valid_after_utc.year <= now.year + 10


def test_only_the_owner_can_read_the_key(tmp_path: Path, open_umask: None) -> None:
    """Under any umask the key and the API key are 0600 and new directories 0700; no other file is left."""
    made = ensure(tmp_path / "tls", (), own)
    ensure_api_key(tmp_path / "api" / "key")
    assert (mode(made.key), mode(tmp_path / "tls")) == (0o600, 0o700)
    assert (mode(tmp_path / "api" / "key"), mode(tmp_path / "api")) == (0o600, 0o700)
    assert {path.name for path in (tmp_path / "tls").iterdir()} == {"certificate.pem", "key.pem"}


def test_an_existing_pair_is_kept(tmp_path: Path) -> None:
    """A second call changes nothing, does not ask for the machine's names, and reports the missing extra names."""
    first = ensure(tmp_path, ["node.example"], own)
    before = first.certificate.read_bytes(), first.key.read_bytes()
    second = ensure(tmp_path, ["node.example", "new.example"], never)
    assert (second.made, second.names, second.left_out) == (False, first.names, ("new.example",))
    assert (second.certificate.read_bytes(), second.key.read_bytes()) == before


@pytest.mark.parametrize("lost", ["certificate", "key"])
def test_half_a_pair_is_replaced(tmp_path: Path, lost: str) -> None:
    """If either file is missing, both are made again and match."""
    first = ensure(tmp_path, (), own)
    (first.certificate if lost == "certificate" else first.key).unlink()
    second = ensure(tmp_path, (), own)
    key = load_pem_private_key(second.key.read_bytes(), None)
    assert second.made
    assert x509.load_pem_x509_certificate(second.certificate.read_bytes()).public_key() == key.public_key()


@pytest.mark.parametrize("name", ["", "a b", "node.example:443", "https://node.example", "[::1]", "a..b", "x" * 64])
def test_an_invalid_extra_name_is_refused(tmp_path: Path, name: str) -> None:
    """An invalid name is an error that quotes it, and nothing is written."""
    with pytest.raises(BadName, match="neither a host name nor an IP address"):
        ensure(tmp_path / "tls", [name], own)
    assert not (tmp_path / "tls").exists()


def test_a_machine_with_an_odd_name_gets_a_certificate(tmp_path: Path) -> None:
    """A host name that cannot be in a certificate is left out and reported; the others are in."""
    made = ensure(tmp_path, (), lambda: ["my box", *OWN])
    assert (made.names, made.left_out) == (OWN, ("my box",))


def test_a_file_that_is_not_a_certificate(tmp_path: Path) -> None:
    """A malformed file in the certificate's place is not overwritten: the error names the file and the remedy."""
    made = ensure(tmp_path, (), own)
    made.certificate.write_text("rubbish")
    with pytest.raises(ValueError, match=r"certificate\.pem is not a certificate.*remove it"):
        ensure(tmp_path, (), own)


def test_the_machine_has_names() -> None:
    """The names of the machine that runs this test include loopback and no scoped link-local address."""
    names = list(own_names())
    assert {"localhost", "127.0.0.1", "::1"} <= set(names)
    assert not any("%" in name for name in names)


def test_the_api_key_is_made_once(tmp_path: Path) -> None:
    """A random UUID is written once and read from then on; an operator's own key is read without its line end."""
    key = ensure_api_key(tmp_path / "key")
    assert uuid.UUID(key).version == 4
    assert ensure_api_key(tmp_path / "key") == key
    (tmp_path / "own").write_text("my very own secret\n")
    assert ensure_api_key(tmp_path / "own") == "my very own secret"


def test_an_empty_api_key_is_an_error(tmp_path: Path) -> None:
    """An empty key file is not taken as a key."""
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ValueError, match="key is empty"):
        ensure_api_key(tmp_path / "key")


def test_the_command_prints_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the files, the names and those left out, and changes nothing when run again."""
    wanted = [f"--san={'n' * 60}.{index:02}.example" for index in range(40)]
    assert main([str(tmp_path), *wanted]) == 0
    first = capsys.readouterr().out
    assert f"made: {tmp_path / 'certificate.pem'}" in first
    assert "left out (no room in a PEM of 2048 characters): " in first
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("exists: ")


def test_the_command_refuses_an_invalid_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid --san ends the command with status 1 and one line that quotes it."""
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--san", "a b"])
    assert ended.value.code == 1
    assert "'a b'" in capsys.readouterr().err
