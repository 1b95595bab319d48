"""The program for the key file."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from node.keys.keyfile import Key, Scope, digest_of, parse
from node.keys.manage import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_new_list_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new key is printed once and kept as a digest, in a file that only its owner may read; a revoked one is gone."""
    file = tmp_path / "made" / "api_keys"
    options = ("--file", str(file))
    ann = run(capsys, *options, "new", "ann").strip()
    bob = run(capsys, *options, "new", "bob", "--scope", "read").strip()
    assert parse(file.read_text()) == (
        Key("ann", Scope.ALL, digest_of(ann)),
        Key("bob", Scope.READ, digest_of(bob)),
    )
    assert ann not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run(capsys, *options, "list") == "ann all\nbob read\n"
    assert run(capsys, *options, "revoke", "ann") == ""
    assert run(capsys, *options, "list") == "bob read\n"


def test_manual_lines_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Comments, and keys in the form they were written in, are unchanged."""
    file = tmp_path / "api_keys"
    file.write_text("# the panel's\npanel  all  some-long-secret-of-mine\n")
    run(capsys, "--file", str(file), "new", "ann")
    run(capsys, "--file", str(file), "revoke", "ann")
    assert file.read_text() == "# the panel's\npanel  all  some-long-secret-of-mine\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("new", "panel"), "two keys with the name panel"),
        (("new", "default"), "default is the name of API_KEY"),
        (("new", "a b"), "a name has"),
        (("revoke", "ann"), "has no key ann"),
    ],
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str) -> None:
    """What cannot be done changes nothing, and is an error."""
    file = tmp_path / "api_keys"
    file.write_text(before := "panel all some-long-secret-of-mine\n")
    with pytest.raises(SystemExit) as ended:
        main(("--file", str(file), *words))
    assert ended.value.code == 1
    assert told in capsys.readouterr().err
    assert file.read_text() == before


def test_a_malformed_file_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with a fault is not overwritten."""
    file = tmp_path / "api_keys"
    file.write_text("panel all\n")
    for words in (("new", "ann"), ("revoke", "panel"), ("list",)):
        with pytest.raises(SystemExit):
            main(("--file", str(file), *words))
        assert "line 1" in capsys.readouterr().err
    assert file.read_text() == "panel all\n"


def test_the_file_of_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an option the file is that of the node with these settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STATE_DIR", raising=False)
    monkeypatch.delenv("API_KEYS_FILE", raising=False)
    run(capsys, "new", "ann")
    assert (tmp_path / "var" / "api_keys").exists()
    (tmp_path / ".env").write_text("STATE_DIR=state\n")
    run(capsys, "new", "ann")
    assert (tmp_path / "state" / "api_keys").exists()
    monkeypatch.setenv("API_KEYS_FILE", "other")
    run(capsys, "new", "ann")
    assert (tmp_path / "other").exists()


def test_many_at_once(tmp_path: Path) -> None:
    """Of commands that run at the same time, none loses another's change."""
    file = str(tmp_path / "api_keys")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: main(("--file", file, "new", f"k{number}")), range(24))) == [0] * 24
    assert len(parse(Path(file).read_text())) == 24
