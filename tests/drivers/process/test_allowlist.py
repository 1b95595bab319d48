"""Types and sockets that the operator allows, and the errors for others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drivers.process.allowlist import Allowed, shown
from drivers.process.paths import Paths
from node.base.errors import InvalidConfig
from node.contract.driver import Host


def host(text: str, paths: str = "") -> Host:
    settings: dict[str, Any] = {"CORE_ALLOW": text, "CORE_PATHS": paths}
    return cast("Host", SimpleNamespace(settings=settings, directory=Path("/state/run"), withheld=()))


def test_known_and_allowed_types_pass() -> None:
    """Spaces and case of the setting do not matter."""
    allowed = Allowed.of(host(" Tun ,, tailscale"))
    for name in ("vless", "tun", "TUN", "tailscale"):
        allowed.judge(name, "here", ("vless",), {})
    assert Allowed.of(host("")).names == frozenset()


def test_the_error_has_type_place_reason_and_remedy() -> None:
    with pytest.raises(InvalidConfig) as refused:
        Allowed.of(host("tun")).judge("tor", "outbounds[1] (out)", (), {"tor": "it runs a program"})
    assert (
        str(refused.value)
        == "outbounds[1] (out): tor is refused, because it runs a program; CORE_ALLOW=tor would allow it"
    )
    with pytest.raises(InvalidConfig, match="the node does not know it"):
        Allowed.of(host("")).judge("new", "here", (), {})


def test_an_error_shows_little_of_a_configuration() -> None:
    """In one line, with any characters."""
    assert shown("a\nb\x1b[0m\ud800" + "x" * 1000) == "a\\nb\\x1b[0m\\ud800" + "x" * 43


@pytest.mark.parametrize("address", ["/state/run/in.sock", "/run/front/in.sock", "@front", "@@padded\0\0"])
def test_allowed_sockets(address: str) -> None:
    Allowed.of(host("", "/run/front")).judge_socket(address, "here")


@pytest.mark.parametrize(
    "address",
    [
        "/run/other.sock",
        "/run/front/../other.sock",
        "/state/run/deeper/in.sock",
        "/state/in.sock",
        "relative",
        "",
        "\0x",
    ],
)
def test_forbidden_sockets(address: str) -> None:
    with pytest.raises(InvalidConfig, match=r"here: the socket .* CORE_PATHS"):
        Allowed.of(host("", "/run/front")).judge_socket(address, "here")


@pytest.mark.parametrize("address", ["@txnode", "@@txnode-1\0"])
def test_reserved_names_of_sockets(address: str) -> None:
    """Refused, whatever the operator allows."""
    with pytest.raises(InvalidConfig, match="reserved"):
        Allowed(paths=Paths((Path("/"),))).judge_socket(address, "here")
