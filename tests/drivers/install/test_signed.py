"""Downloads of wheels that a release key has to have signed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from drivers.install import fetch
from drivers.install.releases import InstallError, Unavailable
from drivers.install.update import bring_wheel, latest
from scripts.staging.mirror import Mirror
from tests.harness.signing import Signer

WHEEL = b"a wheel" * 5000
PATH = "/txnode-1.0.1-py3-none-any.whl"


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setattr(fetch, "PAUSE", 0.0)
    with Mirror() as mirror:
        yield mirror


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("keys") / "key")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("keys") / "other")


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


def offered(mirror: Mirror, signature: bytes, content: bytes = WHEEL) -> str:
    mirror.put(f"{PATH}.sig", signature)
    return mirror.put(PATH, content)


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize("digest", [False, True])
def test_a_signed_wheel(digest: bool, mirror: Mirror, signer: Signer, other: Signer, into: Path) -> None:
    """The signature is enough, by one of the keys; it is downloaded first. A second call downloads no wheel again."""
    sha256 = offered(mirror, signer.sign(WHEEL))
    for _ in range(2):
        found = bring_wheel(mirror.url + PATH, sha256 if digest else "", into, [other.key, signer.key])
        assert found.read_bytes() == WHEEL and names(into) == [PATH[1:]]
    assert [path for path, _ in mirror.asked] == [f"{PATH}.sig", PATH, f"{PATH}.sig"]


def test_without_keys_the_digest_is_needed(mirror: Mirror, signer: Signer, into: Path) -> None:
    """The signature beside it means nothing then."""
    sha256 = offered(mirror, signer.sign(WHEEL))
    with pytest.raises(InstallError, match="64 hexadecimal digits"):
        bring_wheel(mirror.url + PATH, "", into)
    assert mirror.asked == []
    assert bring_wheel(mirror.url + PATH, sha256, into).read_bytes() == WHEEL
    assert mirror.asked == [(PATH, 0)]


WRONG: Mapping[str, tuple[Callable[[Signer, Signer], bytes], str]] = {
    "of another file": (lambda signer, _: signer.sign(b"another"), "of another file"),
    "for another purpose": (lambda signer, _: signer.sign(WHEEL, "file"), "for 'file', and not for 'txnode'"),
    "by another key": (lambda _, other: other.sign(WHEEL), "by another key: ssh-ed25519 AAAA"),
    "a page": (lambda *_: b"<html>not found</html>", "no signature of ssh-keygen"),
    "nothing": (lambda *_: b"", "no signature of ssh-keygen"),
    "no end": (lambda signer, _: signer.sign(WHEEL) + b"\n" * 1_000_000, "no signature of ssh-keygen"),
    "no text": (lambda *_: bytes(range(256)), "no signature of ssh-keygen"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("digest", [False, True])
def test_a_wrong_signature(wrong: str, digest: bool, mirror: Mirror, signer: Signer, other: Signer, into: Path) -> None:
    """Nothing stays on disk, and the text says what to do. The right digest does not help."""
    make, reason = WRONG[wrong]
    sha256 = offered(mirror, make(signer, other))
    with pytest.raises(InstallError, match=f"(?s)not signed by a key of UPDATE_KEY: .*{reason}.*Put the wheel and"):
        bring_wheel(mirror.url + PATH, sha256 if digest else "", into, [signer.key])
    assert names(into) == []


def test_no_signature(mirror: Mirror, signer: Signer, into: Path) -> None:
    """The wheel is not even asked for."""
    mirror.put(PATH, WHEEL)
    with pytest.raises(InstallError, match=r"\.sig: HTTP Error 404: .* copy the \.sig file"):
        bring_wheel(mirror.url + PATH, "", into, [signer.key])
    assert mirror.asked == [(f"{PATH}.sig", 0)] and names(into) == []


def test_another_digest(mirror: Mirror, signer: Signer, into: Path) -> None:
    """A digest in the request counts beside the signature."""
    offered(mirror, signer.sign(WHEEL))
    with pytest.raises(InstallError, match="SHA-256"):
        bring_wheel(mirror.url + PATH, hashlib.sha256(b"another").hexdigest(), into, [signer.key])
    assert names(into) == []


def test_a_download_that_breaks_off(mirror: Mirror, signer: Signer, into: Path) -> None:
    """The next try resumes it, as long as the signature is the same; a half of another wheel is not used."""
    mirror.breaks = [0x7FFFFFFF, *[1000] * fetch.TRIES]
    offered(mirror, signer.sign(WHEEL))
    with pytest.raises(Unavailable):
        bring_wheel(mirror.url + PATH, "", into, [signer.key])
    assert len(names(into)) == 1
    mirror.asked, mirror.breaks = [], []
    bring_wheel(mirror.url + PATH, "", into, [signer.key])
    assert mirror.asked == [(f"{PATH}.sig", 0), (PATH, 1000 * fetch.TRIES)]
    newer = WHEEL[::-1]
    offered(mirror, signer.sign(newer), newer)
    mirror.asked = []
    assert bring_wheel(mirror.url + PATH, "", into, [signer.key]).read_bytes() == newer
    assert mirror.asked == [(f"{PATH}.sig", 0), (PATH, 0)] and names(into) == [PATH[1:]]


def test_a_wheel_that_was_replaced_half_way(mirror: Mirror, signer: Signer, into: Path) -> None:
    """Under the same signature: the pieces do not fit, and the try after it begins again."""
    mirror.breaks = [0x7FFFFFFF, *[1000] * fetch.TRIES]
    offered(mirror, signer.sign(WHEEL), b"x" * len(WHEEL))
    with pytest.raises(Unavailable):
        bring_wheel(mirror.url + PATH, "", into, [signer.key])
    mirror.put(PATH, WHEEL)
    mirror.breaks = []
    with pytest.raises(InstallError, match="not signed"):
        bring_wheel(mirror.url + PATH, "", into, [signer.key])
    assert names(into) == []
    assert bring_wheel(mirror.url + PATH, "", into, [signer.key]).read_bytes() == WHEEL


@pytest.mark.parametrize(
    ("content", "signed", "found"),
    [
        (f"1.0.1 {'a' * 64}\n", False, f"1.0.1 {'a' * 64}"),
        (f"1.0.1 {'a' * 64}\n", True, f"1.0.1 {'a' * 64}"),
        ("1.0.1\n", True, "1.0.1"),
        ("1.0.1\n", False, None),
        ("1.0.1 and more\n", True, None),
        (f"1.0.1 {'a' * 64} more\n", True, None),
        ("", True, None),
    ],
)
def test_the_newest_version(content: str, signed: bool, found: str | None, mirror: Mirror, into: Path) -> None:
    """With keys, the digest may be missing; one that is there has to be one."""
    mirror.put("/latest", content.encode())
    if found is not None:
        assert latest(mirror.url, into, signed) == found
        return
    with pytest.raises(InstallError, match="SHA-256"):
        latest(mirror.url, into, signed)
