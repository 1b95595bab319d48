"""The key file while the node runs: loaded, replaced, malformed, gone, and readable by others."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from node.api.auth import Authenticator
from node.api.keyring import MAX_FILE, Keyring
from node.base.errors import Unauthenticated
from node.keys.keyfile import BadKeys, Key, Scope, digest_of
from node.keys.options import KeyOptions

OWN, ANN, BOB = (str(uuid.UUID(int=number)) for number in (1, 2, 3))


class Ring:
    """A keyring over a file, with the keys that it reported as gone."""

    def __init__(self, file: Path, required: bool = False, secret: Path | None = None, own: str = OWN) -> None:
        self.file = file
        self.authenticator = Authenticator(own)
        self.gone: set[Key] = set()
        options = KeyOptions(key_file=secret, file=file, required=required)
        self.keyring = Keyring(options, self.authenticator, gone=self.gone.update)

    def write(self, *lines: str) -> None:
        """Replace the file, as `node.keys` does."""
        new = self.file.with_suffix(".new")
        new.touch(0o600)
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.file)

    def opens(self, key: str) -> str:
        """Return the name of the caller with this key."""
        try:
            return self.authenticator.check([], [key]).key.name
        except Unauthenticated:
            return ""


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path / "api_keys")


def test_without_a_file(ring: Ring) -> None:
    """Without API_KEYS_FILE the file may be missing, and API_KEY is the only key."""
    ring.keyring.load()
    assert (ring.opens(OWN), ring.opens(ANN)) == ("default", "")
    assert not ring.keyring.changed()
    ring.write(f"ann all {ANN}")
    assert ring.keyring.changed()
    assert ring.keyring.reload()
    assert ring.opens(ANN) == "ann"
    ring.file.unlink()
    assert ring.keyring.reload()
    assert (ring.opens(OWN), ring.opens(ANN)) == ("default", "")


def test_a_configured_file_must_exist(tmp_path: Path) -> None:
    """The error names setting and file."""
    ring = Ring(tmp_path / "keys", required=True)
    with pytest.raises(BadKeys, match=rf"API_KEYS_FILE {ring.file}: no such file"):
        ring.keyring.load()


def test_keys_come_and_go(ring: Ring) -> None:
    """A key that a file no longer has is invalid; keys with the same name and scope are not reported as gone."""
    ring.write(f"ann all {ANN}", f"bob read {BOB}")
    ring.keyring.load()
    assert (ring.opens(ANN), ring.opens(BOB), ring.gone) == ("ann", "bob", set())
    ring.write(f"ann all {ANN}", f"bob metrics {BOB}")
    ring.keyring.reload()
    assert ring.gone == {Key("bob", Scope.READ, digest_of(BOB))}
    ring.write()
    ring.keyring.reload()
    assert (ring.opens(ANN), ring.opens(BOB), ring.opens(OWN)) == ("", "", "default")


@pytest.mark.parametrize(
    "content",
    [b"ann all\n", b"\xff\xfe", b"#" * (MAX_FILE + 1), f"bob all {OWN}".encode()],
    ids=["words", "text", "size", "taken"],
)
def test_a_malformed_file(ring: Ring, content: bytes) -> None:
    """The previous keys stay, `info` warns, and a good file is loaded again."""
    ring.write(f"ann all {ANN}")
    ring.keyring.load()
    ring.file.write_bytes(content)
    assert not ring.keyring.reload()
    assert (ring.opens(ANN), ring.gone) == ("ann", set())
    assert "the previous API keys stay in use" in ring.keyring.fault
    assert not ring.keyring.changed()
    ring.write(f"bob all {BOB}")
    assert ring.keyring.changed()
    assert ring.keyring.reload()
    assert (ring.opens(BOB), ring.keyring.fault) == ("bob", "")


def test_who_may_read(tmp_path: Path) -> None:
    """A warning names each file with keys that every user may read, also API_KEY_FILE; a group may read them."""
    own = tmp_path / "api_key"
    own.touch(0o600)
    ring = Ring(tmp_path / "api_keys", secret=own)
    ring.write(f"ann all {ANN}")
    ring.keyring.load()
    assert ring.keyring.warnings == []
    for mode, files in ((0o640, []), (0o604, [own, ring.file]), (0o602, [own, ring.file])):
        for file in (own, ring.file):
            file.chmod(mode)
        assert [warning.split()[0] for warning in ring.keyring.warnings] == [str(file) for file in reversed(files)]
    assert ring.keyring.changed()


def test_no_key_is_left(tmp_path: Path) -> None:
    """A node that no controller can call warns in its log."""
    ring = Ring(tmp_path / "api_keys", own="")
    ring.write(f"ann all {ANN}")
    ring.keyring.load()
    assert ring.keyring.warnings == []
    ring.write()
    ring.keyring.reload()
    assert "no controller can call" in ring.keyring.warnings[0]
    assert ring.opens("") == ""


def test_unreadable(ring: Ring) -> None:
    """A file that cannot be read is an error like another."""
    ring.file.mkdir()
    with pytest.raises(BadKeys, match="cannot read it"):
        ring.keyring.load()
