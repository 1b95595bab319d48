"""Signatures of files: those that a real `ssh-keygen` makes, and no others."""

from __future__ import annotations

import base64
import io
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from node.base.sshsig import KEYS, LIMIT, BadSignature, Signature, keys_of, verify
from tests.harness.signing import Signer

CONTENT = b"what is signed" * 1000
NAMESPACE = "txnode"


class Made(NamedTuple):
    """What a real ssh-keygen has made: a public key, and its signature of `CONTENT`."""

    key: str
    signature: bytes


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("keys") / "key")


@pytest.fixture(scope="module")
def made(signer: Signer) -> Made:
    return Made(signer.key, signer.sign(CONTENT))


def check(signature: bytes, keys: Sequence[str], content: bytes = CONTENT, namespace: str = NAMESPACE) -> str:
    return verify(signature, io.BytesIO(content), keys, namespace)


@pytest.mark.parametrize("digest", ["sha256", "sha512"])
def test_what_ssh_keygen_signs(signer: Signer, tmp_path: Path, digest: str) -> None:
    """With either digest, by one of several keys; the reply says by which."""
    other = Signer(tmp_path / "other")
    signature = signer.sign(CONTENT, digest=digest)
    assert check(signature, [other.key, signer.key]) == signer.key
    assert Signature.parse(signature).hash == digest
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    with file.open("rb") as opened:
        assert verify(signature, opened, [signer.key], NAMESPACE) == signer.key


def test_all_sizes(signer: Signer) -> None:
    """An empty file as well."""
    for content in (b"", b"1", b"\n", bytes(range(256)) * 5000):
        assert check(signer.sign(content), [signer.key], content)


def test_what_is_not_signed(signer: Signer, made: Made, tmp_path: Path) -> None:
    """Another file, another purpose, another key, no key at all."""
    other = Signer(tmp_path / "other")
    for words, changed in (
        ("of another file", lambda: check(made.signature, [made.key], CONTENT + b"1")),
        ("for 'git', and not for 'txnode'", lambda: check(signer.sign(CONTENT, "git"), [made.key])),
        ("by another key: ssh-ed25519 AAAA", lambda: check(other.sign(CONTENT), [made.key])),
        ("by another key", lambda: check(made.signature, [])),
    ):
        with pytest.raises(BadSignature, match=words):
            changed()


@pytest.mark.parametrize("kind", ["ecdsa", "rsa"])
def test_keys_of_other_kinds(kind: str, made: Made, tmp_path: Path) -> None:
    """Their signatures have the same form."""
    signer = Signer(tmp_path / "key", kind)
    with pytest.raises(BadSignature, match="not one of an Ed25519 key"):
        check(signer.sign(CONTENT), [made.key])
    with pytest.raises(ValueError, match="not an Ed25519 public key"):
        keys_of(signer.public)


def test_every_byte_counts(made: Made) -> None:
    """No byte of a signature can be another one, missing or doubled."""
    whole = made.signature
    for at in range(len(whole)):
        for changed in (bytes([whole[at] ^ 1 << bit]) for bit in range(8)):
            refused(whole[:at] + changed + whole[at + 1 :], made)
        refused(whole[:at] + whole[at : at + 1] * 2 + whole[at + 1 :], made)
        if at < len(whole) - 1:
            refused(whole[:at] + whole[at + 1 :], made)
    # An editor may have taken away the end of the last line.
    assert check(whole.rstrip(b"\n"), [made.key])


def refused(signature: bytes, made: Made) -> None:
    with pytest.raises(BadSignature):
        pytest.fail(f"{signature!r} by {check(signature, [made.key])}")


def test_every_byte_inside_counts(made: Made) -> None:
    """The same for the bytes that base64 carries: lengths, names, the reserved field."""
    packed = base64.b64decode(b"".join(made.signature.splitlines()[1:-1]))
    assert check(armored(packed), [made.key])
    for at in range(len(packed)):
        for value in {0, 255, packed[at] ^ 1, packed[at] ^ 128} - {packed[at]}:
            refused(armored(packed[:at] + bytes([value]) + packed[at + 1 :]), made)
        refused(armored(packed[:at]), made)
    refused(armored(packed + b"\0"), made)


def armored(packed: bytes) -> bytes:
    text = base64.b64encode(packed).decode()
    lines = "".join(f"{line}\n" for line in re.findall(".{1,70}", text))
    return f"-----BEGIN SSH SIGNATURE-----\n{lines}-----END SSH SIGNATURE-----\n".encode()


def test_another_spelling_of_the_same_bytes(made: Made) -> None:
    """The last letter of base64 may carry bits that decode to nothing: they are not accepted."""
    lines = made.signature.splitlines()
    packed = base64.b64decode(b"".join(lines[1:-1]))
    assert len(packed) % 3, "this signature has such bits"
    text = b"".join(lines[1:-1])
    letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    last = len(text.rstrip(b"=")) - 1
    other = text[:last] + bytes([letters[letters.index(text[last]) ^ 1]]) + text[last + 1 :]
    assert base64.b64decode(other) == packed
    refused(b"\n".join([lines[0], other[:70], *re.findall(b".{1,70}", other[70:]), lines[-1], b""]), made)


@given(st.binary(max_size=600), st.booleans())
@example(b"SSHSIG\0\0\0\1" + b"\xff" * 20, True)
@example(b"SSHSIG\0\0\0\1" + b"\0" * 20, True)
def test_any_bytes(packed: bytes, inside: bool) -> None:
    """No other error, whatever the bytes are."""
    for signature in (armored(b"SSHSIG\0\0\0\1" + packed), armored(packed)) if inside else (packed,):
        with pytest.raises(BadSignature):
            check(signature, [])


def test_large_ones(made: Made) -> None:
    """They are refused before they are read."""
    refused(made.signature + b"\n" * LIMIT, made)
    refused(armored(b"SSHSIG\0\0\0\1" + b"\0\0\0\1a" * 100_000), made)


def test_keys(signer: Signer, tmp_path: Path) -> None:
    """One in each line of a file, or with commas between in one setting; comments are not kept."""
    other = Signer(tmp_path / "other")
    assert keys_of(signer.public) == (signer.key,)
    assert keys_of(f"{signer.key}, {other.public}") == (signer.key, other.key)
    text = f"# of releases\n\n  {signer.key} \n{other.public}\n{signer.key} again\n"
    assert keys_of(text) == (signer.key, other.key)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing else",
        "ssh-ed25519",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAA",
        "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43,
        "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43,
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43 + "=",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43 + ", and more",
        'namespaces="txnode" ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI' + "A" * 43,
    ],
)
def test_what_are_no_keys(text: str) -> None:
    with pytest.raises(ValueError, match=r"keys|key of OpenSSH"):
        keys_of(text)


def test_too_many_keys() -> None:
    lines = (f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{number:043}" for number in range(KEYS + 1))
    with pytest.raises(ValueError, match=f"{KEYS + 1} keys"):
        keys_of("\n".join(lines))


def test_ssh_keygen_agrees(signer: Signer, tmp_path: Path) -> None:
    """OpenSSH accepts the same signature."""
    (tmp_path / "signers").write_text(f'txnode namespaces="txnode" {signer.key}\n')
    (tmp_path / "signature").write_bytes(signer.sign(CONTENT))
    command = ["ssh-keygen", "-Y", "verify", "-f", "signers", "-I", "txnode", "-n", NAMESPACE, "-s", "signature"]
    subprocess.run(command, input=CONTENT, cwd=tmp_path, check=True, capture_output=True)
