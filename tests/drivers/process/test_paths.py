"""Files and sockets that a configuration may name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drivers.process.confinement import named_places
from drivers.process.paths import Paths, directories
from drivers.process.settings import CORE_PATHS
from node.base.errors import InvalidConfig


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    for name in ("certs/deep", "state/run", "certificates"):
        (tmp_path / name).mkdir(parents=True)
    real = tmp_path.resolve()
    return Paths((real / "certs", real / "state"), (real / "state",), real / "state" / "run")


def test_a_file_in_an_allowed_directory_may_be_named(paths: Paths, tmp_path: Path) -> None:
    assert paths.allows(tmp_path / "certs" / "deep" / "a.pem")
    assert paths.allows(tmp_path / "certs")
    paths.require(str(tmp_path / "certs" / "a.pem"), "inbounds[0]")


@pytest.mark.parametrize(
    "name", ["certs/../secret", "certificates/a.pem", "certs/../certificates", "", "state/api_key"]
)
def test_a_file_elsewhere_may_not(paths: Paths, tmp_path: Path, name: str) -> None:
    assert not paths.allows(f"{tmp_path}/{name}")


@pytest.mark.parametrize("name", ["certs/a.pem", "\0", "/\0", "/\ud800", "~/a.pem", "file:///etc/passwd"])
def test_a_relative_path_may_not(paths: Paths, name: str) -> None:
    assert not paths.allows(name)


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 30 + "a" * 300])
def test_an_impossible_name(paths: Paths, tmp_path: Path, name: str) -> None:
    """Its place decides whether it is allowed; the core finds out whether it exists."""
    paths.require(f"{tmp_path}/certs/{name}", "inbounds[0]")
    assert list(named_places(paths, f"{tmp_path}/certs/{name}")) in ([], [tmp_path / "certs"] * 2)


def test_a_path_that_takes_long_to_resolve(paths: Paths, tmp_path: Path) -> None:
    for deep in (f"{tmp_path}/certs/" + "a/" * 100, f"{tmp_path}/certs/" + "a" * 5000):
        assert not paths.allows(deep) and not paths.allows_socket(deep)


def test_links_are_resolved(paths: Paths, tmp_path: Path) -> None:
    (tmp_path / "certs" / "out").symlink_to("/etc")
    (tmp_path / "in").symlink_to(tmp_path / "certs")
    assert not paths.allows(tmp_path / "certs" / "out" / "shadow")
    assert paths.allows(tmp_path / "in" / "a.pem")


def test_a_directory_that_contains_withheld_files_may_not_be_named(tmp_path: Path) -> None:
    around = Paths((tmp_path.resolve(),), (tmp_path.resolve() / "state",))
    assert not around.allows(tmp_path)
    assert not around.allows(tmp_path / "state" / "state.db")
    assert around.allows(tmp_path / "other")


def test_a_socket_may_be_in_the_directory_of_the_cores(paths: Paths, tmp_path: Path) -> None:
    assert paths.allows_socket(tmp_path / "state" / "run" / "in.sock")
    assert paths.allows_socket(tmp_path / "certs" / "in.sock")
    assert not paths.allows_socket(tmp_path / "state" / "in.sock")
    assert not paths.allows_socket(tmp_path / "state" / "run" / "kept" / "in.sock")


def test_no_socket_is_among_the_certificates_of_authorities(paths: Paths, tmp_path: Path) -> None:
    certs = replace(paths, authorities=(tmp_path.resolve() / "certs",))
    assert certs.allows(tmp_path / "certs" / "a.pem")
    assert not certs.allows_socket(tmp_path / "certs" / "in.sock")


def test_the_error_names_the_path_the_place_and_the_setting(paths: Paths) -> None:
    with pytest.raises(
        InvalidConfig, match=r"inbounds\[2\].key: '/etc/shadow' is not in a directory that CORE_PATHS allows"
    ):
        paths.require("/etc/shadow", "inbounds[2].key")


def test_directories_are_listed_as_in_path() -> None:
    assert directories("/a:/b/c::") == (Path("/a"), Path("/b/c"))
    assert CORE_PATHS.fault is not None
    assert "'b'" in CORE_PATHS.fault("/a:b")
    assert not CORE_PATHS.fault("/a:/b")
